"""Write the slots of a target: at offsets, in any order, or each file from its first byte to its last."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import numpy as np

from converters.common.box import Box
from converters.common.crc import crc32, join_crc32
from converters.common.dtypes import itemsize
from converters.containers.target import Slot, Target, crc32_of_slots
from converters.store.journal import Journal
from converters.store.manifest import FileSum
from converters.store.output import OffsetFiles, Output
from converters.views.cover import BoxIndex

_READ_BACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """A contiguous run of bytes in a slot that was written."""

    slot: int
    offset: int
    length: int
    crc32: int


@dataclass(slots=True)
class Writing:
    """What a unit of work writes: a run for each slot, and the bytes that wait for those before them."""

    only_slot: int | None  # None: every slot that a box touches
    runs: dict[int, WrittenRun] = field(default_factory=dict)
    waiting: list[memoryview] = field(default_factory=list)

    def add(self, slot: Slot, number: int, box: Box, data: memoryview) -> int:
        """Note the bytes of a box of a slot. Returns their offset in the slot."""
        element = 0  # of the slot, in which whole rows (or parts of one row) are contiguous
        for offset, base, size in zip(box.offsets, slot.box.offsets, slot.box.sizes, strict=True):
            element = element * size + offset - base
        offset, before = element * itemsize(slot.dtype), self.runs.get(number)
        if before is None:
            self.runs[number] = WrittenRun(number, offset, len(data), crc32(data))
            return offset
        assert offset == before.offset + before.length, f"{slot.fqn}: a gap in a slot"
        self.runs[number] = WrittenRun(number, before.offset, before.length + len(data), crc32(data, before.crc32))
        return offset


class Writer(Protocol):
    """Writes the values of units. Use as a context manager, which closes the files."""

    def write(self, writing: Writing, fqn: str, box: Box, array: np.ndarray) -> bool:
        """Take the values of a box, in the thread of the unit; False if they are not written with it."""

    def end(self, writing: Writing) -> None:
        """The unit is finished; in its thread."""

    def take(self, writing: Writing) -> None:
        """The unit's turn has come: units are taken in order, by the main thread."""

    def still_has(self, writing: Writing) -> bool:
        """Whether the output has what a journal has recorded of a unit."""

    def finish(self, crc32s: Sequence[int]) -> dict[str, FileSum]:
        """Write what is around the slots. Returns size and CRC32 of every file with tensors."""

    def __enter__(self) -> "Writer": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OffsetWriter:
    """Writes each box at once, from the thread that has read it, to all slots that it touches."""

    def __init__(self, target: Target, files: OffsetFiles, *, resuming: bool):
        self._target, self._files = target, files
        self._numbers: dict[str, list[int]] = {fqn: [] for fqn in target.tensors}
        for number, slot in enumerate(target.slots):
            self._numbers[slot.fqn].append(number)
        self._indexes = {
            fqn: BoxIndex([target.slots[number].box for number in numbers]) for fqn, numbers in self._numbers.items()
        }
        # All files before a thread writes: an interrupt within `Thread.start` leaves a thread that its pool does not
        # know and cannot wait for. Such a thread must not create a file anew in a folder that is being removed.
        for file in {slot.file for slot in target.slots}:
            files.create(file, exist_ok=resuming)

    def write(self, writing: Writing, fqn: str, box: Box, array: np.ndarray) -> bool:
        for position in self._indexes[fqn].touching(box):
            number = self._numbers[fqn][position]
            slot = self._target.slots[number]
            common = slot.box.intersect(box)
            if common is not None:
                data = _bytes_of(array[common.slices_within(box)] if box.sizes else array)
                self._files.write(slot.file, slot.byte_offset + writing.add(slot, number, common, data), data)
        return True

    def end(self, writing: Writing) -> None:
        for run in writing.runs.values():
            slot = self._target.slots[run.slot]
            self._files.begin_writeback(slot.file, slot.byte_offset + run.offset, run.length)

    def take(self, writing: Writing) -> None:
        pass

    def still_has(self, writing: Writing) -> bool:
        """Read the bytes back and compare them with their CRC32s."""
        for run in writing.runs.values():
            slot, crc = self._target.slots[run.slot], 0
            start, end = slot.byte_offset + run.offset, slot.byte_offset + run.offset + run.length
            for position in range(start, end, _READ_BACK_BYTES):
                crc = crc32(self._files.read(slot.file, position, min(_READ_BACK_BYTES, end - position)), crc)
            if crc != run.crc32:
                return False
        return True

    def finish(self, crc32s: Sequence[int]) -> dict[str, FileSum]:
        return self._target.finish(self._files, crc32s)

    def __enter__(self) -> "OffsetWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


class OrderWriter:
    """Keeps the boxes of a unit until its turn has come, and appends them. Units come in the order of the slots.

    A journal records whole files: those that an earlier attempt has finished are not written again.
    """

    def __init__(self, target: Target, output: Output, crc32s: Sequence[int], *, journal: Journal | None):
        """`crc32s`: those of the slots, each true as soon as all of its units were taken."""
        assert target.streamed, "what is around a slot depends on the slot"
        self._target, self._output, self._crc32s, self._journal = target, output, crc32s, journal
        self._numbers = target.slots_by_file()
        self._keys = {file: -1 - index for index, file in enumerate(self._numbers)}  # in the journal
        self._kept = self._find_kept()
        self._left = iter(self._numbers)
        self._open: _OpenFile | None = None
        self._sums = dict(self._kept)

    def _find_kept(self) -> dict[str, FileSum]:
        kept = {}
        for file, key in self._keys.items():
            record = self._journal.recorded(key) if self._journal else None
            identity = self._output.identity(file) if record else None
            if record and identity is not None and [*identity] == record["identity"]:
                kept[file] = FileSum(record["size"], record["crc32"])
        return kept

    def write(self, writing: Writing, fqn: str, box: Box, array: np.ndarray) -> bool:
        number = writing.only_slot
        if number is None or self._target.slots[number].fqn != fqn:
            return False
        data = _bytes_of(array)
        writing.add(self._target.slots[number], number, box, data)
        writing.waiting.append(data)
        return True

    def end(self, writing: Writing) -> None:
        pass

    def take(self, writing: Writing) -> None:
        for run in writing.runs.values():
            slot = self._target.slots[run.slot]
            if slot.file in self._kept:
                continue
            self._go_to(slot.file)
            assert self._open is not None
            self._open.write_until(slot.byte_offset + run.offset)
            self._open.append(writing.waiting, run)

    def still_has(self, writing: Writing) -> bool:
        return writing.only_slot is None or self._target.slots[writing.only_slot].file in self._kept

    def _go_to(self, file: str | None) -> None:
        """Finish all files before this one, and open it; None: finish all."""
        while self._open is None or self._open.name != file:
            if self._open is not None:
                self._close(self._open)
            name = next((name for name in self._left if name not in self._kept), None)
            if name is None:
                return
            around = self._target.around(name, crc32_of_slots(self._crc32s, self._numbers[name]))
            self._open = _OpenFile(name, self._output, around, self._target.file_bytes[name])

    def _close(self, opened: "_OpenFile") -> None:
        self._open = None
        self._sums[opened.name] = total = opened.finish()
        identity = self._output.identity(opened.name)
        if self._journal and identity is not None:
            record = {"size": total.size, "crc32": total.crc32, "identity": [*identity]}
            self._journal.append(self._keys[opened.name], record)

    def finish(self, crc32s: Sequence[int]) -> dict[str, FileSum]:
        self._go_to(None)
        return {file: self._sums[file] for file in self._numbers}

    def __enter__(self) -> "OrderWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.abort(kind, error, trace)


class _OpenFile:
    """A file that is being appended to, and what is around its slots."""

    def __init__(self, name: str, output: Output, around: Iterator[tuple[int, bytes]], size: int):
        self.name = name
        self._stack, self._around = ExitStack(), around
        self._file = self._stack.enter_context(output.create(name))
        self._sum, self._size = FileSum(0, 0), size

    def write_until(self, position: int) -> None:
        """Write what is around slots up to a position, at which a slot goes on."""
        while self._sum.size < position:
            self._append_piece(*next(self._around))

    def append(self, parts: Sequence[memoryview], run: WrittenRun) -> None:
        for data in parts:
            self._file.write(data)
        self._sum = FileSum(self._sum.size + run.length, join_crc32(self._sum.crc32, run.crc32, run.length))

    def finish(self) -> FileSum:
        for offset, data in self._around:
            self._append_piece(offset, data)
        assert self._sum.size == self._size, f"{self.name}: another size than planned"
        self._stack.close()
        return self._sum

    def abort(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def _append_piece(self, offset: int, data: bytes) -> None:
        assert offset == self._sum.size, f"{self.name}: a gap at byte {self._sum.size}"
        self._file.write(data)
        self._sum = FileSum(offset + len(data), crc32(data, self._sum.crc32))


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
