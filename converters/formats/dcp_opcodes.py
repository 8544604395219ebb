"""The pickle opcodes of a `.metadata`, written one by one, because pickling its real records would import torch."""

import struct
from typing import Any

from converters.catalog import Box

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"


class MetadataEmitter:
    """Writes pickle opcodes. What repeats (names, classes, sizes) is put into the memo once and fetched afterwards."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x04")
        self._memo: dict[Any, int] = {}

    def _fetch(self, key: Any) -> bool:
        number = self._memo.get(key)
        if number is None:
            return False
        self._out += b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def _keep(self, key: Any) -> None:
        self._memo[key] = len(self._memo)
        self._out += b"\x94"

    def text(self, value: str) -> None:
        if not self._fetch(value):
            raw = value.encode("utf-8", "surrogatepass")
            self._out += b"X" + struct.pack("<I", len(raw)) + raw
            self._keep(value)

    def integer(self, value: int) -> None:
        if value < 256:
            self._out += b"K%c" % value
        elif value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            self._out += b"\x8a\x09" + value.to_bytes(9, "little")

    def none(self) -> None:
        self._out += b"N"

    def mapping(self) -> None:
        """Open a dict; keys and values follow in turn."""
        self._out += b"}("

    def end_mapping(self) -> None:
        self._out += b"u"

    def record(self, module: str, name: str) -> None:
        """Open a record of DCP; names and values of its fields follow in turn."""
        self.bare_record(module, name)
        self.mapping()

    def end_record(self) -> None:
        self._out += b"ub"

    def bare_record(self, module: str, name: str) -> None:
        """A record without fields."""
        self._symbol(module, name)
        self._out += b")\x81"

    def _symbol(self, module: str, name: str) -> None:
        if not self._fetch((module, name)):
            self.text(module)
            self.text(name)
            self._out += b"\x93"
            self._keep((module, name))

    # What `.metadata` is made of

    def size(self, values: tuple[int, ...]) -> None:
        key = ("size", values)
        if not self._fetch(key):
            self._symbol("torch", "Size")
            self._out += b"("
            for value in values:
                self.integer(value)
            self._out += b"t\x85R"
            self._keep(key)

    def properties(self, dtype: str) -> None:
        key = ("properties", dtype)
        if not self._fetch(key):
            self.bare_record(METADATA_MODULE, "TensorProperties")
            self._out += b"("
            self._symbol("torch", dtype)
            self._symbol("torch.serialization", "_get_layout")
            self.text("torch.strided")
            self._out += b"\x85R\x89"
            self._symbol(METADATA_MODULE, "_MEM_FORMAT_ENCODING")
            self._out += b"K\x00\x85R\x89tb"
            self._keep(key)

    def list_of_boxes(self, boxes: list[Box]) -> None:
        self._out += b"]("
        for box in boxes:
            self.record(METADATA_MODULE, "ChunkStorageMetadata")
            self.text("offsets")
            self.size(box.offsets)
            self.text("sizes")
            self.size(box.sizes)
            self.end_record()
        self._out += b"e"

    def path(self, parts: tuple) -> None:
        self._out += b"("
        for part in parts:
            self.integer(part) if type(part) is int else self.text(str(part))
        self._out += b"t"

    def finish(self) -> bytes:
        return bytes(self._out + b".")
