"""The protocol of an output: the files of a checkpoint that is being written, which appears complete or not at all.

outputs.py finds who makes the outputs of a location; those of paths are in folder_output.py.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from converters.common.crc import crc32
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import MANIFEST
from converters.store.base import Store
from converters.store.journal import Journal
from converters.store.location import Location
from converters.store.manifest import FileSum, Manifest, TensorSum, dump_manifest, is_kept, sum_file

RESUME_HINT = "what was written is kept: run again with --resume to continue"


class NewFile(Protocol):
    """A file that takes bytes in order."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class OffsetFiles(Protocol):
    """Files that take bytes at any offset, in any order, from several threads."""

    def create(self, name: str, *, exist_ok: bool = True) -> None: ...
    def write(self, name: str, offset: int, data: bytes | memoryview) -> None: ...
    def read(self, name: str, offset: int, length: int) -> bytes: ...

    def begin_writeback(self, name: str, offset: int, length: int) -> None:
        """Start writing a range to the disk, so that committing is quick."""

    def close(self) -> None:
        """Close what is open. Writing opens it again."""


class Output(Protocol):
    """Files of one checkpoint. Readers of its location see them once `commit` returns."""

    @property
    def folder(self) -> Path:
        """A folder of this machine. Functions write small files into it, which `add_small_files` takes."""

    @property
    def offset_files(self) -> OffsetFiles | None:
        """None if files can only be appended to."""

    @property
    def store(self) -> Store:
        """Reads what was written, in any process that writes the output."""

    def create(self, name: str) -> AbstractContextManager[NewFile]:
        """A new file, which is one of the output once the block ends without an error. It is on the disk then."""

    def identity(self, name: str) -> tuple[str | int, ...] | None:
        """What tells that a written file was replaced; None if there is no such file."""

    def add_small_files(self) -> list[str]:
        """Take the files that were written into `folder`; their names, with `/` if they are in folders."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file. If it exists, readers see the old content or the new one."""

    def commit(self, *, overwrite: bool, marks: Sequence[str]) -> None:
        """Make the files the checkpoint of the location; with `overwrite`, instead of the one that is there."""

    def discard(self) -> None:
        """Remove what was written."""


@dataclass(slots=True)
class Claimed:
    """An output of one writer, which holds the lock of its location."""

    output: Output
    journal: Journal
    remarks: tuple[str, ...]  # on what earlier attempts left


class Outputs(Protocol):
    """Makes the outputs of one scheme, each written by one process."""

    @property
    def only_appends(self) -> bool:
        """Whether files can only be appended to, so that plans must be streamed (see Target)."""

    def check(self, location: Location, *, overwrite: bool, marks: Sequence[str]) -> None:
        """Raise CheckpointError unless a checkpoint may be written there.

        A location may be absent or empty or, with `overwrite`, hold a file whose name matches one of `marks`.
        """

    def free_bytes(self, location: Location) -> int:
        """The free bytes of the disk that a location is, or will be, on. Raises CheckpointError if not writable."""

    def bytes_left_behind(self, location: Location) -> int:
        """Bytes of earlier attempts, which the next one resumes or removes."""

    def claim(
        self, location: Location, *, files: Mapping[str, int], is_file: bool, fingerprint: str | None, resume: bool
    ) -> AbstractContextManager[Claimed]:
        """An output of `files` (name → size) that no other process writes. When the block fails, it is discarded.

        With `resume`, what was written is kept after an interrupt or a full disk, and the next attempt with the same
        `fingerprint` continues. Readers see no checkpoint without the last one of `files`: where a commit is no rename,
        it is created last. `is_file`: the location is that of the only file, and nothing else is committed.
        """


@runtime_checkable
class RunOutputs(Outputs, Protocol):
    """Also makes what a run needs: outputs of several processes, and a folder of checkpoints."""

    def prepare(self, location: Location) -> str:
        """Begin an output that several processes write together. One of them calls this first; the rest get its
        result, the identifier of the output.
        """

    def shared(self, location: Location, identifier: str, *, marker: str) -> Output:
        """The output that was prepared with this identifier. `marker`: the file that is created last (see `claim`)."""

    def existing(self, location: Location) -> Output:
        """An output of which small files replace those of the checkpoint that is there. It is not committed."""

    def lock(self, folder: Location, name: str, *, owner: str, patience_secs: float) -> AbstractContextManager[None]:
        """Lock a folder of checkpoints, which is created if it does not exist, for one run; `owner` is for messages.

        Raises Locked if another process still holds the lock after `patience_secs`. It is released when its holder
        ends, whatever ends it.
        """

    def remove(self, location: Location) -> None:
        """Delete a checkpoint, so that it is none at once."""

    def sweep(self, folder: Location) -> None:
        """Remove what killed writers have left in a folder that one run owns, and complete replacements.

        A checkpoint that was aside (`ASIDE_PREFIX` before its name) takes its place again if that is empty.
        """


class Locked(Exception):
    """Another process holds a lock; the text is what it says of itself."""


def can_resume(error: BaseException) -> bool:
    """Whether what was written is valid although the conversion ended: after an interrupt, or a full disk."""
    return not isinstance(error, Exception) or isinstance(error, OSError) or isinstance(error.__cause__, OSError)


class SummedFile:
    """A new file that counts and sums the bytes that go into it. Use as a context manager."""

    def __init__(self, output: Output, name: str):
        self.name, self.size, self.crc32 = name, 0, 0
        self._stack, self._output = ExitStack(), output

    def __enter__(self) -> "SummedFile":
        self._file = self._stack.enter_context(self._output.create(self.name))
        return self

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.size += len(data)
        self.crc32 = crc32(data, self.crc32)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def write_file(output: Output, name: str, data: bytes) -> FileSum:
    """Write a small file and return its size and CRC32."""
    if output.offset_files is not None:
        output.offset_files.create(name)
        output.offset_files.write(name, 0, data)
    else:
        with output.create(name) as file:
            file.write(data)
    return FileSum(len(data), crc32(data))


def write_manifest(
    output: Output,
    *,
    tensors: Mapping[str, TensorSum],
    files: Mapping[str, FileSum] | None = None,
    accepted: bool = False,
    selected: str = "",
) -> Manifest:
    """Write the manifest of `files` and of the small files of an output, which are read once. Call it last.

    `files` are those of all processes that write the output: no list of a store decides what belongs to it.
    """
    small, files = output.add_small_files(), dict(files or {})
    if absent := [name for name in sorted(files.keys() - set(small)) if output.identity(name) is None]:
        raise CheckpointError(f"{output.folder}: files of the manifest are missing:{list_offenders(absent)}")
    names = sorted(name for name in {*small, *files} if is_kept(name))
    sums = {name: files.get(name) or sum_file(output.folder / name) for name in names}
    manifest = Manifest(dict(tensors), sums, accepted, selected)
    output.replace(MANIFEST, dump_manifest(manifest))
    return manifest
