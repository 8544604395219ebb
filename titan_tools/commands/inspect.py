"""titan inspect: describe a checkpoint or a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from converters.common.errors import ConfigError
from converters.common.names import METRICS_FILE
from converters.store.location import locate
from titan_tools.commands.convert_options import Checkpoint, ModelFrom, Select, local_path

if TYPE_CHECKING:
    from titan_tools.pages.run_folder import Curve


def inspect(
    checkpoint: Checkpoint,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN", help="With --plot: folders of further runs.", show_default=False, parser=local_path
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="One line per tensor, layers not folded.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a run's metrics, or those of several, to .png.", show_default=False),
    ] = None,
    loss_curve: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Like --plot, of the losses alone.", show_default=False)
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
      titan inspect outputs --plot run.png
      titan inspect outputs/a outputs/b --plot both.png

    Reads headers and small values, never weights. A run is its job.dump_folder, or the metrics.jsonl in it.
    """
    from titan_tools.pages.run_folder import is_run_folder

    places = [checkpoint, *map(locate, runs or ())]
    places = list(dict.fromkeys(place.parent if place.name == METRICS_FILE else place for place in places))
    is_remote = checkpoint.scheme and len(places) == 1 and not (plot or loss_curve)  # and so no folder of a run
    folders = [] if is_remote else [place.path for place in places]
    if plot or loss_curve:
        _draw(folders, plot, loss_curve)
    elif len(folders) > 1:
        raise ConfigError(
            "inspect shows one folder at a time; --plot draws several runs",
            tries=[f"titan inspect {' '.join(map(str, folders))} --plot runs.png", "titan diff A B"],
        )
    if len(folders) > 1:
        _compare_runs(folders, as_json=as_json)
        return
    if folders and is_run_folder(folders[0]):
        _inspect_run(folders[0], as_json=as_json)
        return
    from converters.inspect import inspect_checkpoint, summarize_values
    from titan_tools.pages.inspect import print_page
    from titan_tools.terminal.console import print_json

    inspection = inspect_checkpoint(checkpoint, fold=not every, select=select, model_from=model_from)
    if as_json:
        print_json(inspection.to_json())
        return
    print_page(inspection, summarize_values(inspection.values), every=every)


def _draw(runs: Sequence[Path], plot: Path | None, loss_curve: Path | None) -> None:
    from titan_tools.pages.run_plot import LOSS, plot_runs, refuse_other_pictures
    from titan_tools.terminal.console import note

    if plot:
        refuse_other_pictures(plot)
        plot_runs(runs, plot)
        note(f"drew {plot}")
    if loss_curve:
        plot_runs(runs, loss_curve, panels=(LOSS,))
        note(f"drew {loss_curve}")


def _inspect_run(folder: Path, *, as_json: bool) -> None:
    from titan_tools.pages.run_folder import summarize_run
    from titan_tools.terminal.console import print_json, table

    run = summarize_run(folder)
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


def _compare_runs(folders: Sequence[Path], *, as_json: bool) -> None:
    from titan_tools.pages.run_folder import summarize_run
    from titan_tools.terminal.console import print_json, table

    runs = [summarize_run(folder) for folder in folders]
    if as_json:
        print_json({"runs": [run.to_json() for run in runs]})
        return
    table(
        ("run", "step", "training loss", "held-out step", "held-out loss"),
        [(run.path, *(cell for curve in (run.loss, run.held_out_loss) for cell in _last_of(curve))) for run in runs],
    )


def _last_of(curve: "Curve") -> tuple[int | str, str]:
    return (curve[-1][0], f"{curve[-1][1]:.4f}") if curve else ("", "")
