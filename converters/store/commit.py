"""Atomic outputs: a folder is written as `.tmp-<id>` beside its destination and renamed when it is complete.

With `overwrite`, the kernel exchanges the two folders if it can (renameat2); elsewhere the old one is renamed
first, and `find_complete` finds it if a kill comes between the two renames.
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import ASIDE_PREFIX, ASSETS_FOLDER, TEMPORARY_PREFIX
from converters.store.replace_file import fsync

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


# Only a folder with one of the caller's marks may be replaced, and only without subfolders that no checkpoint has, such
# as .git or src
_FOLDERS_IN_CHECKPOINTS = {ASSETS_FOLDER, "original", ".cache"}  # titan's, the hub's for Meta's files, `hf download`'s


@contextmanager
def staged(dst: Path, *, marks: Sequence[str], overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `dst`, which becomes `dst` when the block succeeds and is removed when it fails.

    Write the manifest last inside the block. Raises CheckpointError before any work if `dst` exists already.
    """
    check_destination(dst, overwrite=overwrite, marks=marks)
    staging = new_staging(dst, uuid4().hex[:12])
    try:
        yield staging
        commit(staging, dst, overwrite=overwrite, marks=marks)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def check_destination(dst: Path, *, overwrite: bool, marks: Sequence[str]) -> None:
    """Raise CheckpointError unless `dst` may be written.

    It may be absent or an empty folder or, with `overwrite`, a folder that holds a file of one of the patterns `marks`.
    """
    if dst.is_symlink():
        raise CheckpointError(f"{dst}: is a link; give its target")
    if not dst.exists():
        return
    if not dst.is_dir():
        raise CheckpointError(f"{dst}: exists and is not a folder")
    if not any(dst.iterdir()):
        is_mount = dst.absolute().is_mount()
        if is_mount or dst.samefile(Path.cwd()):  # a rename cannot replace the one, and would orphan the other
            what = "a mount point" if is_mount else "the current folder"
            raise CheckpointError(f"{dst}: is {what}, which cannot be replaced", tries=[str(dst / "NEW_FOLDER")])
        return
    if not any(any(dst.glob(mark)) for mark in marks):  # first: --overwrite would not help
        raise CheckpointError(
            f"{dst}: exists already and is not what would be written; it is not replaced",
            hint="give a new folder, or remove this one yourself",
        )
    if strange := sorted(p.name for p in dst.iterdir() if p.is_dir() and p.name not in _FOLDERS_IN_CHECKPOINTS):
        raise CheckpointError(
            f"{dst}: exists already and holds folders that do not belong to a checkpoint; it is not replaced:"
            + list_offenders(strange),
            hint="give a new folder, or remove this one yourself",
        )
    if not overwrite:
        raise CheckpointError(f"{dst}: exists already", hint="nothing was written", tries=["--overwrite"])


def new_staging(dst: Path, identifier: str) -> Path:
    """Make the folder `.tmp-<identifier>` beside `dst`, for one process of a job: the others open it."""
    staging = dst.absolute().parent / f"{TEMPORARY_PREFIX}{identifier}"
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{staging}: cannot be created ({error.strerror})") from error
    return staging


def commit(staging: Path, dst: Path, *, marks: Sequence[str], overwrite: bool = False) -> None:
    """fsync all of `staging`, move it to `dst`, fsync the parent; with `overwrite`, then delete what was there.

    Once the new one is in place, no error is raised: what cannot be deleted of the old one stays as `.tmp-<id>` or
    `.old-<name>` until the parent is cleaned the next time.
    """
    fsync_folder(staging)
    parent = dst.absolute().parent
    check_destination(dst, overwrite=overwrite, marks=marks)
    aside = aside_of(dst)
    if not dst.exists() or not any(dst.iterdir()):
        _rename_new(staging, dst)
        fsync(parent)
        shutil.rmtree(aside, ignore_errors=True)  # left by a kill between the two renames below
        return
    if _renameat2(staging, dst, _RENAME_EXCHANGE):
        fsync(parent)
        shutil.rmtree(staging, ignore_errors=True)  # which is the old one now
        return
    if aside.exists():
        shutil.rmtree(aside)  # left by an earlier kill after the new one was in place
    os.rename(dst, aside)
    os.rename(staging, dst)
    fsync(parent)
    shutil.rmtree(aside, ignore_errors=True)


def aside_of(dst: Path) -> Path:
    """The name of the old folder while the new one is renamed, on file systems that cannot exchange two names."""
    return dst.absolute().parent / f"{ASIDE_PREFIX}{dst.name}"


def find_complete(path: Path) -> Path:
    """`path`, or the old copy (`aside_of`) if a kill between two renames has left only that."""
    if not path.exists() and aside_of(path).is_dir():
        return aside_of(path)
    return path


def fsync_folder(folder: Path) -> None:
    """fsync every file and folder below `folder`, and `folder` itself."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync(Path(root) / name)
        fsync(Path(root))


def sweep_staging(parent: Path) -> None:
    """Remove the folders that killed writers left in `parent`, which one job owns."""
    for folder in [*parent.iterdir()] if parent.is_dir() else ():
        if folder.name.startswith(TEMPORARY_PREFIX) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """The free bytes of the disk that `folder` is on, or will be. Raises CheckpointError if it is not writable."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise CheckpointError(f"{folder}: {existing} is not a folder", hint="nothing was written")
    usage = shutil.disk_usage(existing)
    if not os.access(existing, os.W_OK | os.X_OK) or not usage.total:  # /proc and /sys have no space, even for root
        raise CheckpointError(f"{folder}: {existing} is not writable", hint="nothing was written")
    return usage.free


def _rename_new(staging: Path, dst: Path) -> None:
    try:
        if dst.exists():
            shutil.copymode(dst, staging)
            os.rename(staging, dst)  # replaces an empty folder only
        elif not _renameat2(staging, dst, _RENAME_NOREPLACE):
            os.rename(staging, dst)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise CheckpointError(f"{dst}: appeared while it was being made", hint="another job wrote there") from error
        raise


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """True when done; False if this kernel or file system does not know the call."""
    call = _libc_renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source.absolute()), _AT_FDCWD, os.fsencode(target.absolute()), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(target))


@cache
def _libc_renameat2() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not glibc ≥ 2.28, not Linux
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call
