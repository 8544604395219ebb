"""titan inspect: describe a checkpoint or a run."""

from pathlib import Path
from typing import Annotated

import typer

from converters.errors import CheckpointError
from converters.names import METRICS_FILE
from titan_tools.commands.convert_options import Checkpoint, ModelFrom, Select


def inspect(
    checkpoint: Checkpoint,
    every: Annotated[bool, typer.Option("--every", help="One line per tensor, layers not folded.")] = False,
    loss_curve: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw a run's loss curve to this file.", show_default=False)
    ] = None,
    select: Select = None,
    model_from: ModelFrom = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show the model, tensors, sections and values of a checkpoint; or the checkpoints and losses of a run.

    \b
    Examples:
      titan inspect outputs/checkpoint/step-1000
      titan inspect Llama-3.2-1B --every --json
      titan inspect outputs --loss-curve loss.png

    Reads headers and small values, never weights. A run's folder is its job.dump_folder.
    """
    from titan_tools.run_folder import is_run_folder

    if is_run_folder(checkpoint):
        _inspect_run(checkpoint, loss_curve, as_json=as_json)
        return
    if loss_curve:
        raise CheckpointError(f"{checkpoint} is not the folder of a run: it has no {METRICS_FILE}")
    from converters.inspect import inspect_checkpoint, summarize_values
    from titan_tools.console import print_json
    from titan_tools.inspect_page import print_page

    found = inspect_checkpoint(checkpoint, fold=not every, select=select, model_from=model_from)
    if as_json:
        print_json(found.to_json())
        return
    print_page(found, summarize_values(found.values), every=every)


def _inspect_run(folder: Path, loss_curve: Path | None, *, as_json: bool) -> None:
    from titan_tools.console import note, print_json, table
    from titan_tools.run_folder import draw_loss_curve, summarize_run

    run = summarize_run(folder)
    if loss_curve:
        draw_loss_curve(run, loss_curve)
    if as_json:
        print_json(run.to_json())
        return
    table(
        ("checkpoint", "step", "state"), [(saved.folder, saved.step, saved.problem or "whole") for saved in run.steps]
    )
    print()
    curves = (("training loss", run.loss), ("held-out loss", run.held_out_loss))
    rows = [(name, *curve[0], *curve[-1]) for name, curve in curves if curve]
    table(
        ("nats per token", "from step", "was", "to step", "is"),
        [(name, first, f"{was:.4f}", last, f"{now:.4f}") for name, first, was, last, now in rows],
    )
    if run.unigram_entropy is not None and run.held_out_loss:
        gain = run.unigram_entropy - run.held_out_loss[-1][1]
        print(f"\nthe held-out loss is {gain:.2f} nats below the unigram entropy of {run.unigram_entropy:.4f}")
    if loss_curve:
        note(f"drew {loss_curve}")
