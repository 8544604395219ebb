"""Summary of a run folder: checkpoints and loss curves; the loss curve as a PNG. Does not import torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converters.errors import CheckpointError
from converters.names import METRICS_FILE, RESUMED_FROM
from converters.replace_file import replacing
from trainer.checkpoints.step_folders import list_steps, size_problem, step_folder


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint of the run; `problem` says why it is incomplete, empty if no problem was found."""

    folder: str
    step: int
    problem: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Checkpoints and curves of a run. Curves are (step, nats per token); the latest record of a step counts."""

    path: str
    steps: tuple[SavedStep, ...]
    loss: tuple[tuple[int, float], ...]
    held_out_loss: tuple[tuple[int, float], ...]
    unigram_entropy: float | None  # of the held-out data: the loss of a model that knows only token frequencies

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_run_folder(path: Path) -> bool:
    return (path / METRICS_FILE).is_file()


def summarize_run(path: Path) -> RunSummary:
    """Read metrics.jsonl and list the step folders. Raises CheckpointError for a line that is not a record."""
    loss: dict[int, float] = {}
    held_out: dict[int, float] = {}
    unigram_entropy = None
    for number, line in enumerate((path / METRICS_FILE).read_text().splitlines(), start=1):
        record = _parse(line, path / METRICS_FILE, number)
        if record is None:
            continue
        step = record["step"]
        if RESUMED_FROM in record:  # the run was resumed here: records of later steps no longer count
            loss, held_out = ({s: value for s, value in curve.items() if s <= step} for curve in (loss, held_out))
        if "loss" in record:
            loss[step] = record["loss"]
        if "validation_loss" in record:
            held_out[step] = record["validation_loss"]
        unigram_entropy = record.get("validation_unigram_entropy", unigram_entropy)
    return RunSummary(
        path=str(path),
        steps=tuple(_saved_steps(path)),
        loss=tuple(sorted(loss.items())),
        held_out_loss=tuple(sorted(held_out.items())),
        unigram_entropy=unigram_entropy,
    )


def _parse(line: str, file: Path, number: int) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
        record["step"] + 0  # raises if there is no step number
    except (json.JSONDecodeError, KeyError, TypeError):
        if line.startswith("{") and not line.endswith("}"):
            return None  # cut off when the run was killed
        raise CheckpointError(f"{file}:{number}: not a record of metrics: {line[:80]!r}") from None
    return record


def _saved_steps(path: Path) -> Iterator[SavedStep]:
    """Steps in all checkpoint folders of the run, including resharded ones."""
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()):
        for step in sorted(list_steps(folder)):
            saved = step_folder(folder, step)
            yield SavedStep(str(saved), step, size_problem(saved))


def draw_loss_curve(run: RunSummary, picture: Path) -> None:
    """Draw training and held-out loss over steps to a PNG. Raises CheckpointError if no loss was recorded."""
    if not run.loss:
        raise CheckpointError(f"{run.path}: no loss was recorded yet")
    # imported here: matplotlib takes longer to load than the rest of `titan inspect`
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)", title=run.path)
    axes.plot(*zip(*run.loss, strict=True), label="training", color="tab:blue", alpha=0.7)
    if run.held_out_loss:
        axes.plot(*zip(*run.held_out_loss, strict=True), label="held out", color="tab:orange", marker="o")
    if run.unigram_entropy is not None:
        axes.axhline(run.unigram_entropy, label="unigram entropy", color="grey", linestyle="--")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        with replacing(picture) as unfinished:  # a full disk must not destroy an existing picture
            figure.savefig(unfinished, dpi=120, format="png")
    except OSError as error:
        raise CheckpointError(f"{picture}: cannot be written ({error.strerror})") from error
