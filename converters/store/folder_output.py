"""The output of a folder or a file on this machine: a staging folder `.tmp-<id>/<name>` that is renamed when complete.

A conversion's has a journal, and is locked, and found again after a kill. The journal is beside the folder that becomes
the output, not in it: it exists until the last rename is done, so that a conversion can resume after a kill at any
moment, and it never gets into a checkpoint. The id encodes the destination and the plan: the next conversion to the
same place finds what a killed one left, and resumes it (`resume`, same plan) or removes it.
"""

import ctypes
import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from xxhash import xxh3_64_hexdigest

from converters.common.errors import CheckpointError
from converters.common.names import ASIDE_PREFIX, JOURNAL, TEMPORARY_PREFIX, step_of
from converters.common.threads import deferred_signals
from converters.store.commit import (
    check_destination,
    commit,
    free_bytes,
    fsync_folder,
    new_staging,
    sweep_staging,
)
from converters.store.file_lock import lock_file
from converters.store.folder import FolderStore
from converters.store.journal import Journal
from converters.store.location import Location
from converters.store.open_files import OpenFiles
from converters.store.output import Claimed, Locked, can_resume
from converters.store.replace_file import fsync, replacing

_RETRY_SECS = 0.1


class FolderOutput:
    """Files of the folder `staging`, which becomes `destination`, or whose file of that name does if `is_file`."""

    def __init__(self, staging: Path, destination: Path | None = None, *, is_file: bool = False):
        self.folder = staging
        self.offset_files = FolderFiles(staging)
        self._destination = destination or staging
        self._is_file = is_file

    @property
    def store(self) -> FolderStore:
        return FolderStore(self.folder)

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        with (self.folder / name).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def identity(self, name: str) -> tuple[str | int, ...] | None:
        try:
            status = os.stat(self.folder / name)
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    def add_small_files(self) -> list[str]:
        """They are where they belong: the names of all files."""
        return FolderStore(self.folder).walk()

    def replace(self, name: str, data: bytes) -> None:
        with replacing(self.folder / name, temporary=self.folder / f"{name}.tmp") as temporary:
            temporary.write_bytes(data)

    def commit(self, *, overwrite: bool, marks: Sequence[str]) -> None:
        self.offset_files.close()
        if self._is_file:
            _move_file(self.folder, self._destination, overwrite=overwrite)
        else:
            commit(self.folder, self._destination, overwrite=overwrite, marks=marks)

    def discard(self) -> None:
        self.offset_files.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class FolderFiles:
    """Files of a folder that are written at offsets. A bounded number is open at a time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files = OpenFiles(folder, flags=os.O_RDWR)  # no O_CREAT: see copy_tensors

    def create(self, name: str, *, exist_ok: bool = True) -> None:
        (self._folder / name).touch(exist_ok=exist_ok)

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        with self._files.use(name) as descriptor:
            _write_all(descriptor, data, offset, what=name)

    def read(self, name: str, offset: int, length: int) -> bytes:
        with self._files.use(name) as descriptor:
            return os.pread(descriptor, length, offset)

    def begin_writeback(self, name: str, offset: int, length: int) -> None:
        if call := _sync_file_range():
            with self._files.use(name) as descriptor:
                call(descriptor, offset, length, _WRITE)

    def close(self) -> None:
        self._files.close()


class FolderOutputs:
    """Outputs of paths (see output.Outputs)."""

    only_appends = False

    def check(self, location: Location, *, overwrite: bool, marks: Sequence[str]) -> None:
        check_destination(location.path, overwrite=overwrite, marks=marks)

    def free_bytes(self, location: Location) -> int:
        path = location.path
        return free_bytes(path.absolute().parent if path.is_file() else path)

    def bytes_left_behind(self, location: Location) -> int:
        dst = location.path
        roots = dst.absolute().parent.glob(f"{_prefix(dst)}*")
        return sum(path.lstat().st_blocks * 512 for root in roots for path in root.rglob("*"))

    @contextmanager
    def claim(
        self, location: Location, *, files: Mapping[str, int], is_file: bool, fingerprint: str | None, resume: bool
    ) -> Iterator[Claimed]:
        claimed, dst = None, location.path
        try:
            with deferred_signals():  # one within the claim would leave a folder without an owner
                claimed = _claim(dst, files=files, is_file=is_file, fingerprint=fingerprint, resume=resume)
            yield claimed
            shutil.rmtree(claimed.output.folder.parent, ignore_errors=True)
        except BaseException as error:
            if claimed is None:
                raise
            if claimed.output.offset_files is not None:
                claimed.output.offset_files.close()
            if not (resume and can_resume(error)):
                shutil.rmtree(claimed.output.folder.parent, ignore_errors=True)
            raise
        finally:
            if claimed is not None:
                claimed.journal.close()

    def prepare(self, location: Location) -> str:
        identifier = uuid4().hex[:12]
        new_staging(location.path, identifier)
        return identifier

    def shared(self, location: Location, identifier: str, *, marker: str) -> FolderOutput:
        destination = location.path
        return FolderOutput(destination.absolute().parent / f"{TEMPORARY_PREFIX}{identifier}", destination)

    def existing(self, location: Location) -> FolderOutput:
        fsync_folder(location.path)  # the files are on the disk before a manifest of them is
        return FolderOutput(location.path)

    @contextmanager
    def lock(self, folder: Location, name: str, *, owner: str, patience_secs: float) -> Iterator[None]:
        # The file stays: deleting it would allow two holders, one that opened the old file and one that creates a new.
        path = folder.path
        path.mkdir(parents=True, exist_ok=True)
        with (path / name).open("a+") as file:
            deadline = time.monotonic() + patience_secs
            while not _is_taken(file.fileno()):
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise Locked(file.read().strip())
                time.sleep(_RETRY_SECS)
            file.truncate(0)
            print(owner, file=file, flush=True)
            yield

    def remove(self, location: Location) -> None:
        # Renamed first: an interrupted removal leaves a temporary folder, not half a checkpoint.
        doomed = location.path.with_name(f"{TEMPORARY_PREFIX}{uuid4().hex}")
        location.path.rename(doomed)
        shutil.rmtree(doomed)

    def sweep(self, folder: Location) -> None:
        path = folder.path
        for aside in sorted(path.glob(f"{ASIDE_PREFIX}*")):
            if step_of(aside.name.removeprefix(ASIDE_PREFIX)) is not None:
                step = path / aside.name.removeprefix(ASIDE_PREFIX)
                shutil.rmtree(aside) if step.exists() else aside.rename(step)
        sweep_staging(path)


def _is_taken(descriptor: int) -> bool:
    """Try to take the lock; True, with a warning, on file systems without locks, as some Lustre mounts."""
    try:
        if not lock_file(descriptor):
            print("WARNING: a second run in this folder cannot be detected: no file locks here", file=sys.stderr)
    except BlockingIOError:
        return False
    return True


def _prefix(dst: Path) -> str:
    """The prefix of the staging folders of all attempts at `dst`."""
    return f"{TEMPORARY_PREFIX}{xxh3_64_hexdigest(os.fsencode(dst.name))[:8]}-"


def _claim(dst: Path, *, files: Mapping[str, int], is_file: bool, fingerprint: str | None, resume: bool) -> Claimed:
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
            _keep_only(folder, files)
            return Claimed(FolderOutput(folder, dst, is_file=is_file), journal, tuple(remarks))
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


def _keep_only(folder: Path, files: Mapping[str, int]) -> None:
    """Remove what an earlier attempt left, but for the files with tensor data."""
    for path in list(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in files:
            path.unlink()
        elif path.stat().st_size > files[path.name]:
            os.truncate(path, 0)


def _move_file(folder: Path, dst: Path, *, overwrite: bool) -> None:
    """Move the file of a destination's name out of `folder` to the destination."""
    fsync_folder(folder)
    file = folder / dst.name
    if overwrite:
        os.replace(file, dst)
    else:
        try:
            os.link(file, dst)  # unlike a rename, fails where the file has appeared meanwhile
        except FileExistsError as error:
            raise CheckpointError(f"{dst}: appeared while it was being made", hint="another job wrote there") from error
        except OSError:  # a file system without links
            os.rename(file, dst)
    fsync(dst.parent)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int, *, what: object) -> None:
    """pwrite all of `data`. Raises CheckpointError if the disk is full or fails."""
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        if error.errno == errno.EFBIG:
            hint = "a limit of the disk or `ulimit -f`; --shard-size makes smaller files; incomplete files are removed"
            raise CheckpointError(f"{what}: the file is too long ({error.strerror})", hint=hint) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space, or write to another disk; incomplete files are removed"
            raise CheckpointError(f"{what}: no space left ({error.strerror})", hint=hint) from error
        raise CheckpointError(f"{what}: cannot be written ({error.strerror})") from error


_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start without waiting


@cache
def _sync_file_range() -> Any:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
