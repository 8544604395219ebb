"""titan diff: compare two checkpoints."""

from typing import Annotated

import typer

from converters.store.location import Location
from titan_tools.commands.convert_options import checkpoint_argument, checkpoint_option


def diff(
    a: Annotated[
        Location, checkpoint_argument("A", "A checkpoint of any format, or a model's name in the hub's cache.")
    ],
    b: Annotated[Location, checkpoint_argument("B", "Another one, of the same or another format.")],
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The model of a checkpoint that holds several; given twice, that of A and that of B.",
            show_default=False,
        ),
    ] = None,
    model_from: Annotated[
        Location | None,
        checkpoint_option(
            metavar="FOLDER",
            help="Take config.json, params.json or titan_model.json from here, where a checkpoint has none.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="One line per tensor, layers not folded, however many.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor, of any formats. Exits with 1 if they differ.

    Compares names, shapes, dtypes and values in model order, and the numbers of the model; of training checkpoints also
    the other sections. Detects common mistakes: a missing RoPE permutation, a transpose, a cast.

    \b
    Examples:
      titan diff Llama-3.2-1B llama-1b-dcp
      titan diff step-1000 step-1000-fsdp8 --json
      titan diff grpo.pt grpo.pt --select policy --select reference
    """
    from converters.diff import diff as compare
    from titan_tools.pages.diff import print_differences
    from titan_tools.terminal.console import print_json, progress

    report = compare(a, b, select=select or (), model_from=model_from, progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        print_differences(report, every=every)
    if not report.equal:
        raise typer.Exit(1)
