"""The files that a plan writes: their slots, the writing itself, and their checksums."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from converters.common.box import Box, TensorInfo
from converters.common.crc import crc32, join_crc32
from converters.common.dtypes import itemsize
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

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * itemsize(self.dtype)


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
    and for tied weights, which have no slot of their own. They are in the order of the files and of their bytes.

    `around(file, crc32s)` yields (offset, bytes) of everything in a file but its slots, in order; `crc32s` are those of
    the file's slots. If `streamed`, the CRC32 of a slot is looked up only after the bytes before it were yielded, so a
    file can be written from its first byte to its last.
    """

    tensors: Mapping[str, TensorInfo]
    slots: Sequence[Slot]
    file_bytes: Mapping[str, int]
    around: Callable[[str, Sequence[int]], Iterator[tuple[int, bytes]]]
    other_files: Mapping[str, bytes] = field(default_factory=dict)  # without tensors: name → content, in writing order
    streamed: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(self.file_bytes.values())

    def slots_by_file(self) -> dict[str, list[int]]:
        """File with tensors → the numbers of its slots."""
        numbers: dict[str, list[int]] = {name: [] for name in self.file_bytes if name not in self.other_files}
        for number, slot in enumerate(self.slots):
            numbers[slot.file].append(number)
        return numbers

    def finish(self, folder: Path, crc32s: Sequence[int]) -> dict[str, FileSum]:
        """Write everything that is not tensor data. Returns size and CRC32 of every file."""
        sums = {}
        for file, numbers in self.slots_by_file().items():  # the heads and tails of 470,000 items have 0.3 GB
            pieces = list(self.around(file, [crc32s[number] for number in numbers]))
            write_at(folder / file, pieces)
            ranges = [ChecksummedRange(offset, len(data), crc32(data)) for offset, data in pieces]
            ranges += [
                ChecksummedRange(slot.byte_offset, slot.num_bytes, crc32s[number])
                for number in numbers
                for slot in (self.slots[number],)
            ]
            sums[file] = joined(ranges)
        return sums | {name: write_file(folder / name, data) for name, data in self.other_files.items()}


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
