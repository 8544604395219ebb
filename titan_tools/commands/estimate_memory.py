"""titan estimate-memory: the peak memory of a run, before it is started."""

from pathlib import Path
from typing import Annotated

import typer


def estimate_memory(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file, the one `titan train` takes, or a preset's name.")
    ],
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=262_144, metavar="N", help="Ranks of the run. Default: what the config's degrees need."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="h100-80, h100-96, h200, a100-80 (or a100), b200, or usable GiB: judge this one."
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="classic or expandable (segments).  [default: as PYTORCH_ALLOC_CONF says here, else expandable]",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw one step of the fullest rank, part by part, to this file."),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(metavar="PICKLE", help="Write the fullest rank's allocations for pytorch.org/memory_viz."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say how much GPU memory a run takes at its peak, what takes it, and whether it fits.

    \b
    Examples:
      titan estimate-memory llama3_8b --world-size 8
      titan estimate-memory llama3_70b --world-size 256 --gpu h100-80 --activation_checkpoint.mode=full
      titan estimate-memory llama3_8b --world-size 8 --timeline step.png

    No GPU is needed and no weight is made: the real train step runs on tensors without memory, as one rank of any job,
    and what it asks for is given out by a model of the GPU's allocator. Any key of the config can be overridden, as in
    `titan train`: --section.key value. With --gpu the exit code is the verdict: 0 fits, 1 does not, 5 too close to
    call. What is not covered is refused with exit code 2.
    """
    from converters.collector import collector_paused

    with collector_paused():  # also while torch is loaded, where it takes half a second
        from titan_tools.memory.command import estimate_from_command_line

        code = estimate_from_command_line(
            config,
            context.args,
            world_size=world_size,
            gpu_text=gpu,
            allocator=allocator,
            timeline=timeline,
            snapshot=snapshot,
            as_json=as_json,
        )
    if code:
        raise typer.Exit(code)
