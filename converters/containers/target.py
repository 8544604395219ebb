"""The files that a plan writes: their slots, what is around those, and their checksums."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from converters.common.box import Box, TensorInfo
from converters.common.crc import crc32, join_crc32
from converters.common.dtypes import itemsize
from converters.store.manifest import FileSum
from converters.store.output import OffsetFiles

Crc32Of = Callable[[int], int]  # of the n-th slot of a file


class Slot(NamedTuple):
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
    """An output that is to be written (see copy_tensors).

    Slots cover every tensor exactly once, except for tensors that each of Meta's shards repeats (once in every file)
    and for tied weights, which have no slot of their own. They are in the order of the files and of their bytes.

    `around(file, crc32_of)` yields (offset, bytes) of everything in a file but its slots, in order; `crc32_of(n)` is
    the CRC32 of its n-th slot. If `streamed`, it is called only after the bytes before that slot were yielded, so a
    file can be written from its first byte to its last.
    """

    tensors: Mapping[str, TensorInfo]
    slots: Sequence[Slot]
    file_bytes: Mapping[str, int]
    around: Callable[[str, Crc32Of], Iterator[tuple[int, bytes]]]
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

    def finish(self, files: OffsetFiles, crc32s: Sequence[int]) -> dict[str, FileSum]:
        """Write what is around the slots, which are filled. Returns size and CRC32 of every file with tensors."""
        sums = {}
        for file, numbers in self.slots_by_file().items():  # the heads and tails of 470,000 items have 0.3 GB
            pieces = list(self.around(file, crc32_of_slots(crc32s, numbers)))
            files.create(file)
            for offset, data in pieces:
                files.write(file, offset, data)
            ranges = [ChecksummedRange(offset, len(data), crc32(data)) for offset, data in pieces]
            for number in numbers:
                slot = self.slots[number]
                ranges.append(ChecksummedRange(slot.byte_offset, slot.num_bytes, crc32s[number]))
            sums[file] = joined(ranges)
        return sums


def crc32_of_slots(crc32s: Sequence[int], numbers: Sequence[int]) -> Crc32Of:
    """Looks up the CRC32 of a file's n-th slot; `numbers`: of the file's slots in `crc32s`."""
    return lambda n: crc32s[numbers[n]]


def joined(segments: Iterable[ChecksummedRange]) -> FileSum:
    """Size and CRC32 of a file from its segments. They must be contiguous."""
    size = crc = 0
    for segment in sorted(segments, key=lambda s: (s.byte_offset, s.length)):  # an empty one before the next
        assert segment.byte_offset == size, f"a gap in an output file at byte {size}"
        crc = join_crc32(crc, segment.crc32, segment.length)
        size += segment.length
    return FileSum(size, crc)
