"""titan estimate-memory: estimate the peak GPU memory of a run before it starts."""

from pathlib import Path
from typing import Annotated

import typer


def estimate_memory(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="TOML file, as for `titan train`, or a preset's name.")
    ],
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=262_144, metavar="N", help="Ranks of the run. Default: as many as the config's degrees need."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Judge this type: h100-80, h100-96, h200, a100-80 (or a100), b200, or usable GiB."
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="classic or expandable (segments).  [default: by PYTORCH_ALLOC_CONF, else expandable]",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw one step of the fullest rank, by part, to this file."),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(metavar="PICKLE", help="Write the fullest rank's allocations for pytorch.org/memory_viz."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Estimate how much GPU memory a run takes at its peak, what takes it, and whether it fits.

    \b
    Examples:
      titan estimate-memory llama3_8b --world-size 8
      titan estimate-memory llama3_70b --world-size 256 --gpu h100-80 --activation_checkpoint.mode=full
      titan estimate-memory llama3_8b --world-size 8 --timeline step.png

    No GPU is needed and no weights are allocated: the real train step runs on fake tensors, as one rank of any job, and
    a model of torch's CUDA allocator replays what it allocates. Override any key of the config as in `titan train`:
    --section.key value. With --gpu the exit code is the verdict: 0 fits, 1 does not fit, 5 too close to call. A config
    that is not covered is refused with exit code 2.
    """
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
