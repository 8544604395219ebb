"""The step folders of a run: list, check, clean up and delete them. For one process; torch-free."""

import shutil
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import (
    ASIDE_PREFIX,
    DCP_METADATA,
    MANIFEST,
    RUN_LOCK,
    STEP_FOLDER,
    TEMPORARY_PREFIX,
    step_of,
)
from converters.store.commit import sweep_staging
from converters.store.manifest import check_sizes


def step_folder(folder: Path, step: int) -> Path:
    return folder / STEP_FOLDER.format(step=step)


def list_steps(folder: Path) -> list[int]:
    """Steps with a folder of exactly that name, newest first. Links and files of that name are not checkpoints."""
    if not folder.is_dir():
        return []
    folders = (entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    steps = {step_of(entry.name): entry.name for entry in folders}
    return sorted(
        (s for s, name in steps.items() if s is not None and name == STEP_FOLDER.format(step=s)), reverse=True
    )


def steps_to_load(folder: Path, steps: list[int], wanted: int) -> list[int]:
    """The steps of a folder that may be loaded: `wanted` (checkpoint.load_step) alone, unless it is -1."""
    if wanted == -1:
        return steps
    if wanted not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{folder} has no step {wanted} to load", hint=f"steps there: {there}")
    return [wanted]


def sweep(folder: Path) -> None:
    """Clean up after killed saves and removals: restore a step that was being replaced, delete the rest."""
    if folder.is_dir():
        for aside in steps_aside(folder):
            step = folder / aside.name.removeprefix(ASIDE_PREFIX)
            shutil.rmtree(aside) if step.exists() else aside.rename(step)
        sweep_staging(folder)


def steps_aside(folder: Path) -> list[Path]:
    """Steps that a save was replacing; a kill between its two renames leaves one without its successor."""
    aside = folder.glob(f"{ASIDE_PREFIX}*")
    return [path for path in aside if step_of(path.name.removeprefix(ASIDE_PREFIX)) is not None]


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if the folder holds files but no step: a new run there is probably a mistake.

    Called before anything is deleted: other files are not titan's to remove.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"the checkpoint folder is not a folder: {folder}")
    if not folder.is_dir() or list_steps(folder) or steps_aside(folder):
        return
    own_names = (TEMPORARY_PREFIX, RUN_LOCK)
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(own_names))
    if names:
        raise CheckpointError(
            f"{folder} holds no checkpoint of a run, but other files:" + list_offenders(names, most=5),
            hint="a run saves to, and resumes from, folders named exactly step-<n>",
            tries=[
                "--checkpoint.folder NEW_FOLDER",
                "--checkpoint.initial_load_path PATH, to start from other weights",
            ],
        )


def size_problem(path: Path) -> str:
    """Why a step folder is incomplete, judged by its manifest and file sizes; empty if it is not."""
    if not (path / DCP_METADATA).is_file():
        return f"it has no {DCP_METADATA}"
    try:
        return "" if check_sizes(path) else f"it has no {MANIFEST}"
    except CheckpointError as error:
        return error.message


def no_usable_step(folder: Path, problems: Sequence[str]) -> CheckpointError:
    """The error of a run whose steps are all damaged."""
    return CheckpointError(
        f"no checkpoint in {folder} can be used:" + list_offenders(problems),
        hint="nothing was loaded; a folder without a manifest may come from another tool",
        tries=["--checkpoint.folder NEW_FOLDER --checkpoint.initial_load_path OTHER_CHECKPOINT"],
    )


def retire(folder: Path, *, keep: int, newest: int, damaged: Collection[int] = ()) -> list[int]:
    """Delete the oldest complete steps beyond `newest`, the one just saved, and the `keep - 1` before it; returns them.

    Steps after `newest`, from before a run was resumed at an earlier step, are neither counted nor deleted. Nor are
    `damaged` and incomplete steps: an intact one is never deleted in their favour.
    """
    before = [step for step in list_steps(folder) if step < newest and step not in damaged]
    removed = [step for step in before if not size_problem(step_folder(folder, step))][keep - 1 :]
    for step in reversed(removed):
        # Renamed first: an interrupted removal leaves a temporary folder, not half a checkpoint.
        doomed = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        step_folder(folder, step).rename(doomed)
        shutil.rmtree(doomed)
    return removed
