"""CRC32s of what a load reads, compared with the manifest by all ranks together, so that no byte is read twice.

Each rank sums the byte ranges that it reads. Ranges that follow one another give the CRC32 of a whole file; what no
rank has read, or only in too many small ranges, is divided among the ranks and read for its CRC32 alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from heapq import nlargest
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from converters.common.crc import crc32, join_crc32
from converters.engine.read import CatalogReader
from converters.store.base import Store, reading_part
from converters.store.manifest import FileSum, in_threads, sum_range
from trainer.ranks.agree import on_each

_MOST_RANGES = 8192  # of a rank; all ranks get them, 32 bytes each
_PART_BYTES = 256 << 20  # of what is read for its CRC32 alone


class _Range(NamedTuple):
    """A part of a file, and its CRC32; None if no rank has read it."""

    start: int
    length: int
    crc32: int | None


class _Span(NamedTuple):
    """A range that this rank has read."""

    start: int
    end: int
    crc32: int


@dataclass(slots=True)
class _File:
    """A file as a rank knows it: where chunks begin, and what surrounds the values of DCP items that it has opened.

    Ranges of two ranks are equal, or do not overlap, if each is a part of one chunk; the bytes around the values are
    read by the ranks that have their beginning, and their end.
    """

    ranges: dict[tuple[int, int], int] = field(default_factory=dict)  # (start, length) → CRC32
    begins: set[int] = field(default_factory=set)
    heads: dict[int, int] = field(default_factory=dict)  # where values begin → where their item does
    tails: dict[int, int] = field(default_factory=dict)  # where values end → where their item does


class ReadSums:
    """The byte ranges that this rank reads through `reader`, with their CRC32s."""

    def __init__(self, reader: CatalogReader) -> None:
        self._reader = reader
        self._files: dict[str, _File] = defaultdict(_File)
        self._unsteady: set[str] = set()  # files of which two reads gave different bytes
        reader.on_read = self._add

    def _add(self, file: str, start: int, data: memoryview) -> None:
        crc = crc32(data)
        if self._files[file].ranges.setdefault((start, len(data)), crc) != crc:
            self._unsteady.add(file)

    def problems(self, files: Mapping[str, FileSum], group: dist.ProcessGroup) -> list[str]:
        """Problems of `files`; [] if each has its CRC32. All ranks of `group` get the same answer."""
        names, rank, world = sorted(files), group.rank(), group.size()
        gathered = on_each(group, lambda: (self._largest(files, names), self._unsteady))
        rows = np.concatenate([ranges for ranges, _ in gathered])
        rows = np.unique(rows[rows[:, 0] % world == rank], axis=0)  # of this rank's share; sorted, the longest first
        is_same_range = (rows[1:, :3] == rows[:-1, :3]).all(axis=1)
        unsteady = set().union(*(changed for _, changed in gathered), (names[n] for n in rows[1:][is_same_range, 0]))
        parts: dict[str, list[_Range]] = {}
        for number in range(rank, len(names), world):
            begin, end = np.searchsorted(rows[:, 0], (number, number + 1))
            parts[names[number]] = list(_cover(files[names[number]].size, rows[begin:end, 1:].tolist()))
        crc32s = _sum_unread(self._reader.catalog.store, parts, group)

        def own_problems() -> list[str]:
            return [f"{name}: two reads of it gave different bytes" for name in sorted(unsteady & parts.keys())] + [
                f"{name}: its bytes have changed (CRC32)" for name in parts if crc32s[name] != files[name].crc32
            ]

        return sorted(problem for share in on_each(group, own_problems) for problem in share)

    def _largest(self, files: Mapping[str, FileSum], names: list[str]) -> np.ndarray:
        """This rank's ranges as rows [file number, start, -length, CRC32]."""
        self._look_at_chunks()
        rows = [
            (number, span.start, span.start - span.end, span.crc32)
            for number, name in enumerate(names)
            if name in self._files
            for span in _join(self._reader.catalog.store, name, self._files[name], files[name].size)
        ]
        return np.array(nlargest(_MOST_RANGES, rows, key=lambda row: -row[2]), dtype=np.int64).reshape(-1, 4)

    def _look_at_chunks(self) -> None:
        for entry in self._reader.catalog.tensors.values():
            for chunk in entry.chunks:
                if chunk.file in self._files:
                    self._files[chunk.file].begins.add(chunk.item[0] if chunk.item else chunk.byte_offset)
        for chunk in self._reader.opened:
            if chunk.item and chunk.record and chunk.file in self._files:
                (begin, length), (start, num_bytes) = chunk.item, chunk.record
                self._files[chunk.file].heads[start] = begin
                self._files[chunk.file].tails[start + num_bytes] = begin + length


def _join(store: Store, name: str, opened: _File, size: int) -> list[_Span]:
    """Ranges without overlap, each in one chunk, with the bytes around it; a single one if that is all of a file."""
    spans: list[_Span] = []
    read_at = reading_part(store, name, 0, store.size(name))
    for (start, length), crc in sorted(opened.ranges.items()):
        begin, end = opened.heads.get(start, start), opened.tails.get(start + length, start + length)
        if spans and begin < spans[-1].end:  # overlaps the range before it
            continue
        head, tail = (read_at(a, b - a) for a, b in ((begin, start), (start + length, end)))
        span = _Span(begin, end, crc32(tail, join_crc32(crc32(head), crc, length)))
        is_same_chunk = spans and begin == spans[-1].end and begin not in opened.begins
        spans[-1:] = [_joined(spans[-1], span)] if is_same_chunk else [*spans[-1:], span]
    follows = [(before.end, after.start) for before, after in zip(spans, spans[1:], strict=False)]
    if spans and spans[0].start == 0 and spans[-1].end == size and all(end == start for end, start in follows):
        return [reduce(_joined, spans)]
    return spans


def _joined(first: _Span, second: _Span) -> _Span:
    crc = join_crc32(first.crc32, second.crc32, second.end - second.start)
    return _Span(first.start, second.end, crc)


def _cover(size: int, rows: Iterable[list[int]]) -> Iterator[_Range]:
    """Ranges that together are a file of `size` bytes, from sorted rows [start, -length, CRC32] that may overlap."""
    end = 0
    for start, negative_length, crc in [*rows, [size, 0, 0]]:
        if start >= end:
            for part in range(end, start, _PART_BYTES):
                yield _Range(part, min(_PART_BYTES, start - part), None)
            yield _Range(start, -negative_length, crc)
            end = start - negative_length


def _sum_unread(store: Store, parts: Mapping[str, list[_Range]], group: dist.ProcessGroup) -> dict[str, int]:
    """CRC32 of each file of this rank's share, after all ranks together have read what none of them had."""
    local_parts = [(name, part) for name, ranges in parts.items() for part in ranges if part.crc32 is None]
    unread = [each for share in on_each(group, lambda: local_parts) for each in share]
    rank, world = group.rank(), group.size()
    works = [partial(sum_range, store, name, part.start, part.length) for name, part in unread[rank::world]]
    crcs: dict[tuple[str, int], int] = {}
    for reader, sums in enumerate(on_each(group, lambda: in_threads(works))):
        crcs |= {(n, p.start): s.crc32 for (n, p), s in zip(unread[reader::world], sums, strict=True)}
    crc32s = {}
    for name, ranges in parts.items():
        crc = 0
        for part in ranges:
            crc = join_crc32(crc, crcs[name, part.start] if part.crc32 is None else part.crc32, part.length)
        crc32s[name] = crc
    return crc32s
