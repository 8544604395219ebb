"""Content of a run folder: the curves of its metrics, losses and checkpoints. Does not import torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError
from converters.common.names import METRICS_FILE, RESUMED_FROM
from trainer.checkpoints.step_folders import list_steps, size_problem, step_folder

Curve = tuple[tuple[int, float], ...]  # (step, value), by step


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
    loss: Curve
    held_out_loss: Curve
    unigram_entropy: float | None  # of the held-out data: the loss of a model that knows only token frequencies

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_run_folder(path: Path) -> bool:
    return (path / METRICS_FILE).is_file()


def read_curves(path: Path) -> dict[str, Curve]:
    """Every metric of metrics.jsonl over the steps; the latest record of a step counts.

    Raises CheckpointError for a folder that is not a run's, and for a line that is not a record.
    """
    if not is_run_folder(path):
        raise _not_a_run(path)
    curves: dict[str, dict[int, float]] = {}
    for number, line in enumerate((path / METRICS_FILE).read_text("utf-8", "replace").splitlines(), start=1):
        record = _parse(line, path / METRICS_FILE, number)
        if record is None:
            continue
        step = record.pop("step")
        if RESUMED_FROM in record:  # the run was resumed here: records of later steps no longer count
            curves = {name: {s: v for s, v in curve.items() if s <= step} for name, curve in curves.items()}
            continue
        for name, value in record.items():
            curves.setdefault(name, {})[step] = value
    return {name: tuple(sorted(curve.items())) for name, curve in curves.items() if curve}


def _not_a_run(path: Path) -> CheckpointError:
    if not path.exists():
        return CheckpointError(f"{path}: no such folder")
    around = [folder for folder in path.absolute().parents if is_run_folder(folder)]
    return CheckpointError(
        f"{path} is not the folder of a run: it has no {METRICS_FILE}",
        hint="a run's folder is its job.dump_folder",
        tries=[str(around[0])] if around else [],
    )


def summarize_run(path: Path) -> RunSummary:
    """The losses of metrics.jsonl and the step folders. Raises CheckpointError as `read_curves` does."""
    curves = read_curves(path)
    entropy = curves.get("validation_unigram_entropy")
    return RunSummary(
        path=str(path),
        steps=tuple(_saved_steps(path)),
        loss=curves.get("loss", ()),
        held_out_loss=curves.get("validation_loss", ()),
        unigram_entropy=entropy[-1][1] if entropy else None,
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
