"""The files that a plan writes: their slots, the writing itself, and their checksums."""

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.common.box import Box, TensorInfo
from converters.common.crc import crc32, join_crc32
from converters.common.errors import CheckpointError
from converters.store.manifest import FileSum


@dataclass(frozen=True, slots=True)
class Slot:
    """A box of a tensor and its place in the output: row-major and contiguous, from `byte_offset` of `file`."""

    fqn: str
    dtype: str
    box: Box
    file: str
    byte_offset: int


@dataclass(frozen=True, slots=True)
class ChecksummedRange:
    """Bytes of a file with their CRC32, in file order; the file's CRC32 is combined from them."""

    byte_offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Target:
    """An output that is to be written. Fill every slot, then call `finish` with the CRC32s in the order of `slots`.

    Slots cover every tensor exactly once, except for tensors that each of Meta's shards repeats (once in every file)
    and for tied weights, which have no slot of their own.

    `finish` writes everything that is not tensor data and returns size and CRC32 of every file it knows.
    """

    tensors: Mapping[str, TensorInfo]
    slots: Sequence[Slot]
    file_bytes: Mapping[str, int]
    finish: Callable[[Path, Sequence[int]], dict[str, FileSum]]

    @property
    def total_bytes(self) -> int:
        return sum(self.file_bytes.values())


def joined(segments: Iterable[ChecksummedRange]) -> FileSum:
    """Size and CRC32 of a file from its segments. They must be contiguous."""
    size = crc = 0
    for segment in sorted(segments, key=lambda s: (s.byte_offset, s.length)):  # an empty one before the next
        assert segment.byte_offset == size, f"a gap in an output file at byte {size}"
        crc = join_crc32(crc, segment.crc32, segment.length)
        size += segment.length
    return FileSum(size, crc)


def write_all(descriptor: int, data: bytes | memoryview, offset: int, *, what: object) -> None:
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


def write_at(path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Write (offset, bytes) pieces into a file, which is created if it does not exist."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for offset, data in pieces:
            write_all(descriptor, data, offset, what=path)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> FileSum:
    """Write a small file and return its size and CRC32."""
    write_at(path, [(0, data)])
    return FileSum(len(data), crc32(data))
