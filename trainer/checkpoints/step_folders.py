"""The step folders of a run: list, check, clean up and delete them. For one process; torch-free."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

from converters.common.errors import CheckpointError, Damaged, Missing, list_offenders
from converters.common.names import (
    ASIDE_PREFIX,
    DCP_METADATA,
    MANIFEST,
    RUN_LOCK,
    STEP_FOLDER,
    TEMPORARY_PREFIX,
    step_of,
)
from converters.store.base import is_file_at, names_at, open_store
from converters.store.local_files import is_link
from converters.store.location import Location, Place, locate
from converters.store.manifest import check_sizes
from converters.store.outputs import run_outputs_at
from converters.store.paths import NotAFile

P = TypeVar("P", Path, Location)


def step_folder(folder: P, step: int) -> P:
    return folder / STEP_FOLDER.format(step=step)


def list_steps(folder: Place) -> list[int]:
    """Steps with a folder of exactly that name, newest first. Links and files of that name are not checkpoints."""
    steps = {step_of(name): name for name in folders_in(folder)}
    return sorted(
        (s for s, name in steps.items() if s is not None and name == STEP_FOLDER.format(step=s)), reverse=True
    )


def folders_in(folder: Place) -> list[str]:
    """The names of the folders in a folder, without links; none if it does not exist."""
    names = [name[:-1] for name in names_at(locate(folder)) if name.endswith("/")]
    root = open_store(locate(folder))[0].local() if names else Path()
    return [name for name in names if not is_link(root / name)]


def steps_to_load(folder: Place, steps: list[int], wanted: int) -> list[int]:
    """The steps of a folder that may be loaded: `wanted` (checkpoint.load_step) alone, unless it is -1."""
    if wanted == -1:
        return steps
    if wanted not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{folder} has no step {wanted} to load", hint=f"steps there: {there}")
    return [wanted]


def sweep(folder: Place) -> None:
    """Clean up after killed saves and removals: restore a step that was being replaced, delete the rest."""
    location = locate(folder)
    run_outputs_at(location).sweep(location)


def steps_aside(folder: Place) -> list[str]:
    """Folders of steps that a save was replacing; a kill between its two renames leaves one without its successor."""
    aside = (name.rstrip("/") for name in names_at(locate(folder)) if name.startswith(ASIDE_PREFIX))
    return [name for name in aside if step_of(name.removeprefix(ASIDE_PREFIX)) is not None]


def refuse_foreign(folder: Place) -> None:
    """Raise CheckpointError if the folder holds files but no step: a new run there is probably a mistake.

    Called before anything is deleted: other files are not titan's to remove.
    """
    if is_file_at(locate(folder)):
        raise CheckpointError(f"the checkpoint folder is not a folder: {folder}")
    if list_steps(folder) or steps_aside(folder):
        return
    own_names = (TEMPORARY_PREFIX, RUN_LOCK)
    names = [name.rstrip("/") for name in names_at(locate(folder)) if not name.startswith(own_names)]
    if names:
        raise CheckpointError(
            f"{folder} holds no checkpoint of a run, but other files:" + list_offenders(names, most=5),
            hint="a run saves to, and resumes from, folders named exactly step-<n>",
            tries=[
                "--checkpoint.folder NEW_FOLDER",
                "--checkpoint.initial_load_path PATH, to start from other weights",
            ],
        )


def size_problem(path: Place) -> str:
    """Why a step folder is incomplete, judged by its manifest and file sizes; empty if it is not.

    Raises CheckpointError if its store cannot be asked: an older step may not be taken for the newest then.
    """
    try:
        store, _ = open_store(locate(path))
        store.size(DCP_METADATA)
    except (Missing, NotAFile):
        return f"it has no {DCP_METADATA}"
    try:
        return "" if check_sizes(store) else f"it has no {MANIFEST}"
    except Damaged as error:
        return error.message


def no_usable_step(folder: Place, problems: Sequence[str]) -> CheckpointError:
    """The error of a run whose steps are all damaged."""
    return CheckpointError(
        f"no checkpoint in {folder} can be used:" + list_offenders(problems),
        hint="nothing was loaded; a folder without a manifest may come from another tool",
        tries=["--checkpoint.folder NEW_FOLDER --checkpoint.initial_load_path OTHER_CHECKPOINT"],
    )


def retire(folder: Place, *, keep: int, newest: int, damaged: Collection[int] = ()) -> list[int]:
    """Delete the oldest complete steps beyond `newest`, the one just saved, and the `keep - 1` before it; returns them.

    Steps after `newest`, from before a run was resumed at an earlier step, are neither counted nor deleted. Nor are
    `damaged` and incomplete steps: an intact one is never deleted in their favour.
    """
    location = locate(folder)
    before = [step for step in list_steps(folder) if step < newest and step not in damaged]
    removed = [step for step in before if not size_problem(step_folder(location, step))][keep - 1 :]
    for step in reversed(removed):
        run_outputs_at(location).remove(step_folder(location, step))
    return removed
