"""`titan estimate-memory`: estimate the peak GPU memory of a run."""

from pathlib import Path
from typing import Annotated

import typer

from titan_tools.commands.config_words import check_words
from titan_tools.terminal.completion import complete_allocator, complete_config, complete_gpu


def estimate_memory(
    context: typer.Context,
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A TOML file as for `titan train`, or the name of a preset.",
            autocompletion=complete_config,
        ),
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
            metavar="TYPE",
            autocompletion=complete_gpu,
            help="Judge only this one: h100-80, a100-40, b300, mi300x, rtx4090, … (docs/memory.md), or usable GiB.",
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_allocator,
            help="classic or expandable (segments).  [default: that of PYTORCH_ALLOC_CONF, else expandable]",
        ),
    ] = None,
    imbalance: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="Expert parallelism: judge with F times the mean rows on the fullest rank.  [default: 1.5]",
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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Estimate the peak GPU memory of a run, its parts, and whether it fits.

    \b
    Examples:
      titan estimate-memory llama3_8b --world-size 8
      titan estimate-memory llama3_70b --world-size 256 --gpu h100-80 --activation_checkpoint.mode=full
      titan estimate-memory llama3_8b --world-size 8 --timeline step.png

    No GPU is needed: the train step runs on fake tensors as one rank of the job, and its allocations are replayed by a
    model of CUDA's allocator. Every key of the config can be given as --section.key VALUE, as for `titan train`. With
    --gpu the exit code is the verdict: 0 fits, 1 does not fit, 5 too close to call. Features that the estimate does not
    support are refused with exit code 2.
    """
    from converters.common.collector import collector_paused

    check_words(context, config)
    with collector_paused():  # also while torch is imported: 0.2 of 4 seconds
        from titan_tools.memory.command import estimate_from_command_line

        code = estimate_from_command_line(
            config,
            context.args,
            world_size=world_size,
            gpu_text=gpu,
            allocator=allocator,
            imbalance=imbalance,
            timeline=timeline,
            snapshot=snapshot,
            as_json=as_json,
        )
    if code:
        raise typer.Exit(code)
