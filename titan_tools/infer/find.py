"""Find the checkpoint to read: the newest complete step of a run, and the folder of the tokenizer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import DCP_METADATA, MANIFEST
from converters.containers.dcp import DCP
from converters.source.open import local_folder
from converters.store.base import names_at, open_store
from converters.store.location import Location, Place, locate
from converters.store.manifest import check_files, read_manifest
from converters.tokenizers.assets import TOKENIZERS, find_assets
from titan_tools.infer.text.chat_template import has_template
from titan_tools.terminal.console import note
from trainer.checkpoints.step_folders import folders_in, list_steps, size_problem, step_folder
from trainer.config.sections import Checkpoint


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint to try, and why newer steps were skipped; each reason is given once."""

    place: Location
    is_step: bool = False  # of a run's folder: if it is damaged, an older one may be used
    skipped: tuple[str, ...] = ()


def find_checkpoints(place: Place) -> Iterator[FoundCheckpoint]:
    """`place` itself, or the steps of a run's folder that look complete, newest first.

    A caller that takes another step has found the one before damaged, and reports that. Raises CheckpointError if no
    step is left.
    """
    location = locate(place)
    run = _folder_of_steps(location)
    if run is None:
        yield FoundCheckpoint(location)
        return
    problems: list[str] = []
    num_reported = 0
    for step in list_steps(run):
        folder = step_folder(run, step)
        problem = size_problem(folder) or _small_file_problem(folder)
        if not problem:
            yield FoundCheckpoint(folder, True, tuple(problems[num_reported:]))
            problem, num_reported = "it is damaged", len(problems) + 1
        problems.append(f"{folder.name}: {problem}")
    raise CheckpointError(f"no step in {run} is complete:" + list_offenders(problems))


def newest_step(place: Location) -> Location:
    """The newest step with a .metadata file where `place` is a run's folder, with a note; else `place`."""
    run = _folder_of_steps(place)
    steps = [step_folder(run, step) for step in list_steps(run)] if run else []
    complete = [step for step in steps if DCP.marks(names_at(step))]
    if not complete:
        return place
    cut_off = ", ".join(step.name for step in steps[: steps.index(complete[0])])
    others = f"; another step: titan verify {complete[1]}" if len(complete) > 1 else ""
    note(
        f"{place} is a run's folder: its newest step, {complete[0].name}, is verified"
        + (f" ({cut_off}: no {DCP_METADATA}, an interrupted save)" if cut_off else "")
        + others
    )
    return complete[0]


def find_tokenizer(root: Path, model_from: Place | None, assets: Mapping[str, Path]) -> Path:
    """The folder of the tokenizer: the checkpoint's, `root`, else `model_from`.

    `assets`: of the open checkpoint. Where both folders have the tokenizer, it is the same one, and `model_from` is
    chosen if only it has a chat template. Raises CheckpointError if neither has a tokenizer.
    """
    places = [root, *([local_folder(model_from)] if model_from else [])]
    own, given = _tokenizer_in(root), _tokenizer_in(places[1]) if model_from else {}
    if own and own.items() <= assets.items():
        return places[-1] if own.keys() & given and has_template(places[-1]) and not has_template(root) else root
    if found := next(filter(_tokenizer_in, reversed(places)), None):
        return found
    raise CheckpointError(
        f"there is no tokenizer in {' or '.join(map(str, places))}",
        hint=f"looked for {', '.join(TOKENIZERS)}",
        tries=["--model-from FOLDER, a folder that has the model's tokenizer"],
    )


def _small_file_problem(step: Location) -> str:
    """The problem of a step's files without tensors, which are read before the check for damage."""
    store, _ = open_store(step)
    manifest = read_manifest(store.local([MANIFEST]))
    small = [name for name in manifest.files if not DCP.is_data(name)] if manifest else []
    return "; ".join(check_files(store, small, manifest=manifest))


def _folder_of_steps(place: Location) -> Location | None:
    """The folder with a run's steps; None if `place` is not a run's folder."""
    names = names_at(place)
    if not names or DCP.marks(names):
        return None
    return next((folder for folder in _places_of_steps(place) if list_steps(folder)), None)


def _places_of_steps(place: Location) -> Iterator[Location]:
    """Where a run may keep its steps: here, in the default subfolder, or in the only other subfolder with steps."""
    yield place
    yield (usual := place / Checkpoint().folder)
    others = [place / name for name in folders_in(place) if place / name != usual and list_steps(place / name)]
    yield from others if len(others) == 1 else ()


def _tokenizer_in(folder: Path) -> dict[str, Path]:
    return {name: path for name, path in find_assets(folder).items() if name in TOKENIZERS}
