"""The staging folder of an output, `.tmp-<id>/<name>`, with a journal: locked, and found again after a kill.

The journal is beside the folder that becomes the output, not in it: it exists until the last rename is done, so that a
conversion can resume after a kill at any moment, and it never gets into a checkpoint. The id encodes the destination
and the plan: the next conversion to the same place finds what a killed one left, and resumes it (`resume`, same plan)
or removes it.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from xxhash import xxh3_64_hexdigest

from converters.common.errors import CheckpointError
from converters.common.names import JOURNAL, TEMPORARY_PREFIX
from converters.common.threads import deferred_signals
from converters.engine.journal import Journal
from converters.store.commit import new_staging

RESUME_HINT = "what was written is kept: run again with --resume to continue"


@dataclass(slots=True)
class Unfinished:
    """An output that is being written."""

    folder: Path  # becomes the output
    journal: Journal
    remarks: tuple[str, ...]  # on what earlier attempts left


@contextmanager
def staged_output(
    dst: Path, *, fingerprint: str | None, resume: bool, commit: Callable[[Path], None]
) -> Iterator[Unfinished]:
    """A folder that `commit` moves to `dst` when the block succeeds.

    When it fails, everything is removed; with `resume`, it is kept after an interrupt or a full disk. Raises
    CheckpointError before any work if another process is making `dst`.
    """
    staged = None
    try:
        with deferred_signals():  # one within the claim would leave a folder without an owner
            staged = _claim(dst, fingerprint=fingerprint, resume=resume)
        yield staged
        commit(staged.folder)
        shutil.rmtree(staged.folder.parent, ignore_errors=True)
    except BaseException as error:
        if staged is None:
            raise
        if not (resume and can_resume(error)):
            shutil.rmtree(staged.folder.parent, ignore_errors=True)
            raise
        if isinstance(error, CheckpointError):
            raise CheckpointError(error.message, hint=RESUME_HINT) from error
        error.add_note(RESUME_HINT)
        raise
    finally:
        if staged is not None:
            staged.journal.close()


def can_resume(error: BaseException) -> bool:
    """Whether what was written is valid although the conversion ended: after an interrupt, or a full disk."""
    return not isinstance(error, Exception) or isinstance(error, OSError) or isinstance(error.__cause__, OSError)


def bytes_left_behind(dst: Path) -> int:
    """Bytes on disk of earlier attempts at `dst`, which the next one resumes or removes."""
    roots = dst.absolute().parent.glob(f"{_prefix(dst)}*")
    return sum(path.lstat().st_blocks * 512 for root in roots for path in root.rglob("*"))


def _prefix(dst: Path) -> str:
    """The prefix of the staging folders of all attempts at `dst`."""
    return f"{TEMPORARY_PREFIX}{xxh3_64_hexdigest(os.fsencode(dst.name))[:8]}-"


def _claim(dst: Path, *, fingerprint: str | None, resume: bool) -> Unfinished:
    prefix = _prefix(dst)
    root = new_staging(dst, prefix.removeprefix(TEMPORARY_PREFIX) + (fingerprint or uuid4().hex))
    try:
        journal = _open_journal(root, dst)
        try:
            remarks = _clear_others(root, dst, prefix)
            folder = root / dst.name
            header = {"plan": fingerprint, "destination": dst.name}
            if not (resume and fingerprint and journal.load(header)):
                remarks += _begin(root, journal, header)
                if resume:
                    remarks.append("there was nothing to resume: started from the beginning")
            folder.mkdir(exist_ok=True)
            return Unfinished(folder, journal, tuple(remarks))
        except BaseException as error:
            if not resume and not isinstance(error, Exception):  # an interrupt leaves nothing, also here
                shutil.rmtree(root, ignore_errors=True)
            journal.close()
            raise
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be written ({error.strerror})") from error


def _open_journal(root: Path, dst: Path) -> Journal:
    try:
        return Journal(root / JOURNAL)
    except CheckpointError as error:
        raise _busy(dst) from error


def _busy(dst: Path) -> CheckpointError:
    return CheckpointError(f"{dst}: another conversion is writing it now", hint="wait for it, or give another folder")


def _clear_others(root: Path, dst: Path, prefix: str) -> list[str]:
    """Remove what killed conversions to the same place left. Raises CheckpointError if one is still running."""
    remarks = []
    for stale in sorted(root.parent.glob(f"{prefix}*")):
        if stale == root or stale.is_symlink() or not stale.is_dir():
            continue
        try:
            journal = Journal(stale / JOURNAL)
        except CheckpointError as error:
            if not (root / dst.name).exists():  # it has just been created
                shutil.rmtree(root, ignore_errors=True)
            raise _busy(dst) from error
        except OSError:  # gone, or another user's
            continue
        shutil.rmtree(stale, ignore_errors=True)
        journal.close()
        remarks.append(f"{stale.name}, left by a conversion to {dst.name} of another plan that was killed, was removed")
    return remarks


def _begin(root: Path, journal: Journal, header: dict[str, str | None]) -> list[str]:
    """Remove what an earlier attempt left, and start the journal."""
    left = [path for path in root.iterdir() if path.name != JOURNAL]
    for path in left:
        shutil.rmtree(path)
    journal.start(header)
    return ["what a killed conversion of the same plan had left was removed"] if left else []
