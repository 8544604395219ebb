"""Where a plan's bytes go: destination slots and, once they are filled, what makes a checkpoint of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.catalog import Box, TensorInfo
from converters.crc import join_crc32
from converters.manifest import FileSum


@dataclass(frozen=True, slots=True)
class Slot:
    """A box of a tensor and where it is written: row-major and contiguous, from `byte_offset` of `file`."""

    fqn: str
    dtype: str
    box: Box
    file: str
    byte_offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a file with their CRC32, in file order; a file's own CRC32 is joined from them."""

    byte_offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Target:
    """An output to be written. Fill every slot, then call `finish` with the slots' CRC32s (in the order of `slots`).

    Slots cover every tensor exactly once, but for what each of Meta's shards repeats (once in every file), and for one
    whose data another tensor's slot holds (tied weights), which has none.

    `finish` writes everything that is not tensor data and returns size and CRC32 of every file it knows.
    """

    tensors: Mapping[str, TensorInfo]
    slots: Sequence[Slot]
    file_bytes: Mapping[str, int]
    finish: Callable[[Path, Sequence[int]], dict[str, FileSum]]

    @property
    def total_bytes(self) -> int:
        return sum(self.file_bytes.values())


def joined(segments: Iterable[Segment]) -> FileSum:
    """Size and CRC32 of a file from its segments. They must follow each other without a gap."""
    size = crc = 0
    for segment in sorted(segments, key=lambda s: (s.byte_offset, s.length)):  # an empty one before what follows it
        assert segment.byte_offset == size, f"a gap in an output file at byte {size}"
        crc = join_crc32(crc, segment.crc32, segment.length)
        size += segment.length
    return FileSum(size, crc)
