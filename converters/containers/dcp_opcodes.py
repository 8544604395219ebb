"""Emit the pickle opcodes of a `.metadata`: pickling its real records would import torch."""

import struct
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from converters.common.box import Box

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"

_END_RECORD = b"ub"


class StorageLocation(NamedTuple):
    """The location of a box's item: file, first byte, length. A plain value has no box."""

    box: Box | None
    file: str
    start: int
    length: int


class MetadataEmitter:
    """Emits pickle opcodes. Repeated names, classes and sizes are put into the memo once and fetched afterwards.

    Every method returns bytes, which must be written in the order of the calls: the memo is numbered.
    """

    def __init__(self) -> None:
        self._memo: dict[Any, bytes] = {}  # what was emitted → the opcode that fetches it
        self._box_lists: dict[tuple[int, ...], tuple[Sequence[Box], bytes]] = {}  # by the ids of the boxes

    def _kept(self, key: Any) -> bytes:
        number = len(self._memo)
        self._memo[key] = b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return b"\x94"

    def text(self, value: str) -> bytes:
        found = self._memo.get(value)
        if found is not None:
            return found
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw + self._kept(value)

    @staticmethod
    def integer(value: int) -> bytes:
        if value < 256:
            return b"K%c" % value
        if value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        return b"\x8a\x09" + value.to_bytes(9, "little")

    def record(self, module: str, name: str) -> bytes:
        """Open a record of DCP; names and values of its fields follow, then `end_record`."""
        return self.bare_record(module, name) + b"}("

    end_record = _END_RECORD
    start, mapping, end_mapping, none, stop = b"\x80\x04", b"}(", b"u", b"N", b"."

    def bare_record(self, module: str, name: str) -> bytes:
        """A record without fields."""
        return self._symbol(module, name) + b")\x81"

    def _symbol(self, module: str, name: str) -> bytes:
        found = self._memo.get((module, name))
        return found or b"".join((self.text(module), self.text(name), b"\x93", self._kept((module, name))))

    # The parts of `.metadata`

    def size(self, values: tuple[int, ...]) -> bytes:
        found = self._memo.get(values)
        if found is not None:
            return found
        numbers = b"".join(map(self.integer, values))
        return b"".join((self._symbol("torch", "Size"), b"(", numbers, b"t\x85R", self._kept(values)))

    def properties(self, dtype: str) -> bytes:
        key = ("properties", dtype, "")  # another length than a symbol's key
        reference = self._memo.get(key)
        if reference is not None:
            return reference
        parts = (
            self.bare_record(METADATA_MODULE, "TensorProperties"),
            b"(",
            self._symbol("torch", dtype),
            self._symbol("torch.serialization", "_get_layout"),
            self.text("torch.strided"),
            b"\x85R\x89",
            self._symbol(METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
            b"K\x00\x85R\x89tb",
            self._kept(key),
        )
        return b"".join(parts)

    def list_of_boxes(self, boxes: Sequence[Box]) -> bytes:
        """ChunkStorageMetadata of each. Layers share their boxes, so most lists are in the memo already."""
        ids = tuple(map(id, boxes))
        if ids in self._box_lists:
            return self._box_lists[ids][1]
        defines = self._boxes(boxes)
        self._box_lists[ids] = boxes, self._boxes(boxes)  # holds the boxes, so that their ids stay valid
        return defines

    def _boxes(self, boxes: Sequence[Box]) -> bytes:
        parts = [b"]("]
        for box in boxes:
            parts += (
                self.record(METADATA_MODULE, "ChunkStorageMetadata"),
                self.text("offsets"),
                self.size(box.offsets),
                self.text("sizes"),
                self.size(box.sizes),
                _END_RECORD,
            )
        return b"".join((*parts, b"e"))

    def path(self, parts: tuple[Any, ...]) -> bytes:
        inner = b"".join([self.integer(part) if type(part) is int else self.text(str(part)) for part in parts])
        return b"(" + inner + b"t"

    def places(self, fqn: str, places: Iterable[StorageLocation]) -> bytes:
        """MetadataIndex and _StorageInfo of each: shared parts of half a million of them are joined beforehand."""
        known, integer = self._memo.get, cache(self.integer)  # starts and lengths repeat from rank to rank
        parts: list[bytes] = []
        fixed: tuple[bytes, ...] = ()
        for number, (box, file, start, length) in enumerate(places):
            if not fixed:
                parts += self._place(fqn, number, box, file, start, length)
                fixed = self._between(fqn)
                continue
            assert box is not None, f"{fqn}: a plain value in two places"
            to_index, to_offset, to_file, to_start, to_length = fixed
            offset, name = known(box.offsets) or self.size(box.offsets), known(file) or self.text(file)
            parts += (to_index, integer(number), to_offset, offset, to_file, name)
            parts += (to_start, integer(start), to_length, integer(length), _END_RECORD)
        return b"".join(parts)

    def _place(self, fqn: str, number: int, box: Box | None, file: str, start: int, length: int) -> Iterable[bytes]:
        yield self.record(METADATA_MODULE, "MetadataIndex")
        yield self.text("fqn")
        yield self.text(fqn)
        yield self.text("index")
        yield self.none if box is None else self.integer(number)
        if box is not None:
            yield self.text("offset")
            yield self.size(box.offsets)
        yield _END_RECORD
        yield self.record(FILESYSTEM_MODULE, "_StorageInfo")
        yield self.text("relative_path")
        yield self.text(file)
        yield self.text("offset")
        yield self.integer(start)
        yield self.text("length")
        yield self.integer(length)
        yield _END_RECORD

    def _between(self, fqn: str) -> tuple[bytes, ...]:
        """The constant parts between index, offset, file, start and length of a location, all in the memo already."""
        text = self.text
        return (
            self.record(METADATA_MODULE, "MetadataIndex") + text("fqn") + text(fqn) + text("index"),
            text("offset"),
            _END_RECORD + self.record(FILESYSTEM_MODULE, "_StorageInfo") + text("relative_path"),
            text("offset"),
            text("length"),
        )
