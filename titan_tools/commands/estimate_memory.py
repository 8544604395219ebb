"""titan estimate-memory: the peak memory of a run, before it is started."""

from typing import Annotated

import typer


def estimate_memory(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file, the one `titan train` takes, or a preset's name.")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the run; needed where the config takes all there are.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="h100-80, h100-96, h200, a100-80, b200, or a GPU's usable GiB: judge this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say how much GPU memory a run takes at its peak, what takes it, and whether it fits.

    \b
    Examples:
      titan estimate-memory llama3_8b --world-size 8
      titan estimate-memory llama3_70b --world-size 256 --gpu h100-80 --activation_checkpoint.mode=full

    No GPU is needed and no model is built. Any key of the config can be overridden, as in `titan train`:
    --section.key value. With --gpu the exit code is the verdict: 0 fits, 1 does not, 5 too close to call. What is not
    covered is refused with exit code 2.
    """
    from titan_tools.memory.command import estimate_from_command_line

    code = estimate_from_command_line(config, context.args, world_size=world_size, gpu_text=gpu, as_json=as_json)
    if code:
        raise typer.Exit(code)
