"""From the paths a user gives to folders: a run's newest whole step, what says the model, what has the tokenizer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from converters.assets import TOKENIZERS, find_assets
from converters.containers.hf_cache import snapshot_of
from converters.errors import CheckpointError, list_offenders
from converters.manifest import check_files, read_manifest
from converters.names import DCP_METADATA, TIKTOKEN_MODEL, TOKENIZER_JSON
from titan_tools.console import note
from titan_tools.infer.text.chat_template import has_template
from trainer.checkpoints.step_folders import list_steps, size_problem, step_folder
from trainer.config.sections import Checkpoint

_DATA = ".distcp"  # the files that hold tensors


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint to try, and why newer steps than it were skipped; each reason is given once."""

    folder: Path
    is_step: bool = False  # of a run whose folder was named: where it is damaged, there may be an older one
    skipped: tuple[str, ...] = ()


def find_checkpoints(path: Path) -> Iterator[Found]:
    """`path` itself, or those steps of a run's folder that look whole, newest first.

    Who asks for the next step has found the last one damaged, and reports that. Raises CheckpointError where no step is
    left.
    """
    run = _folder_of_steps(path)
    if run is None:
        yield Found(path)
        return
    problems, num_told = [], 0
    for step in list_steps(run):
        folder = step_folder(run, step)
        problem = size_problem(folder) or _small_file_problem(folder)
        if not problem:
            yield Found(folder, True, tuple(problems[num_told:]))
            problem, num_told = "it is damaged", len(problems) + 1
        problems.append(f"{folder.name}: {problem}")
    raise CheckpointError(f"no step in {run} is whole:" + list_offenders(problems))


def newest_step(path: Path) -> Path:
    """The newest step with a .metadata where `path` is a run's folder, and a note that names it; else `path`."""
    run = _folder_of_steps(path)
    steps = [step_folder(run, step) for step in list_steps(run)] if run else []
    complete = [step for step in steps if (step / DCP_METADATA).is_file()]
    if not complete:
        return path
    cut_off = ", ".join(step.name for step in steps[: steps.index(complete[0])])
    others = f"; another step: titan verify {complete[1]}" if len(complete) > 1 else ""
    note(
        f"{path} is a run's folder: its newest step, {complete[0].name}, is verified"
        + (f" ({cut_off}: no {DCP_METADATA}, a save that was cut off)" if cut_off else "")
        + others
    )
    return complete[0]


def find_tokenizer(root: Path, model_from: Path | None, assets: Mapping[str, Path]) -> Path:
    """The folder of the tokenizer: that of the checkpoint, which lies in `root`, else `model_from`'s.

    `assets`: of the checkpoint that is open; with `model_from`, its tokenizer is the same as that of `root`, or none.
    Then `model_from` may still have a chat template that `root` lacks. Raises CheckpointError where neither has one.
    """
    own, given = _tokenizer_in(root), _tokenizer_in(_folder_of(model_from)) if model_from else {}
    places = [root, *([_folder_of(model_from)] if model_from else [])]
    if own and own.items() <= assets.items():
        return places[-1] if own.keys() & given and has_template(places[-1]) and not has_template(root) else root
    if found := next(filter(_tokenizer_in, reversed(places)), None):
        return found
    raise CheckpointError(
        f"there is no tokenizer in {' or '.join(map(str, places))}",
        hint=f"looked for {TOKENIZER_JSON} and {TIKTOKEN_MODEL}",
        tries=["--model-from FOLDER, a folder that has the model's tokenizer"],
    )


def _small_file_problem(step: Path) -> str:
    """What is wrong with a step's files that hold no tensors: reading them would fail before anything is compared."""
    small = [name for name in read_manifest(step).files if not name.endswith(_DATA)]
    return "; ".join(check_files(step, small))


def _folder_of_steps(path: Path) -> Path | None:
    """Where the steps of a run are; None where `path` is no run's folder."""
    if not path.is_dir() or (path / DCP_METADATA).is_file():
        return None
    return next((folder for folder in _places_of_steps(path) if list_steps(folder)), None)


def _places_of_steps(path: Path) -> list[Path]:
    """Where a run may keep its steps: here, in the folder of that name, or in the one that it was told to take."""
    usual = path / Checkpoint().folder
    others = [p for p in sorted(path.iterdir()) if p.is_dir() and not p.is_symlink() and p != usual and list_steps(p)]
    return [path, usual, *(others if len(others) == 1 else ())]


def _folder_of(path: Path) -> Path:
    return snapshot_of(path) if path.is_dir() else path.parent


def _tokenizer_in(folder: Path) -> dict[str, Path]:
    return {name: path for name, path in find_assets(folder).items() if name in TOKENIZERS}
