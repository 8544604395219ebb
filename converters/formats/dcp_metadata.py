"""DCP's `.metadata`: read it with stand-in records, write it by emitting opcodes. torch is not imported either way."""

import struct
from typing import Any, NamedTuple

from converters.catalog import UNLOCATED, BlobEntry, Box, Catalog, Chunk, TensorEntry
from converters.dtypes import DTYPES
from converters.errors import CheckpointError, UnsupportedError, list_offenders
from converters.formats.paths import checked_file_name
from converters.formats.safe_pickle import PLAIN_STUBS, Sealed, Stubs, safe_load
from converters.formats.tensor_pickle import DTypeName

_MAX_METADATA_BYTES = 8 << 30  # 10,000 ranks of a 405B write 6.7 GB
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
VERSION = "1.0.0"


class _Record(metaclass=Sealed):
    """Stands in for one of DCP's dataclasses: keeps the state that the pickle sets, calls nothing."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Bytes(_Record):
    __slots__ = ()


class _ChunkBox(_Record):
    __slots__ = ()


class _Properties(_Record):
    __slots__ = ()


class _Index(_Record):
    __slots__ = ()


class _StorageInfo(_Record):
    __slots__ = ()


class _Ignored(metaclass=Sealed):
    """Stands in for what says nothing about the data: paths, layouts, memory formats, StorageMeta."""

    __slots__ = ("arguments",)

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass


_STUBS: Stubs = {
    **PLAIN_STUBS,
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "ChunkStorageMetadata"): _ChunkBox,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Ignored,
    (_METADATA, "StorageMeta"): _Ignored,
    (_METADATA, "MetadataIndex"): _Index,
    (_FILESYSTEM, "_StorageInfo"): _StorageInfo,
    # torch before 2.2 and OLMo-core: the same records under other names
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Ignored,
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("torch", "Size"): tuple,  # harmless, and four times as fast as a function of ours
    # A checkpoint_id that was a Path; `pathlib._local` is how Python 3.13 spells it
    **{
        (module, name): _Ignored
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
    },
    **{("torch", name): DTypeName(name) for name in DTYPES},
}


class DcpEntries(NamedTuple):
    """What a `.metadata` lists. Its chunks are not located yet (see `Chunk.item`)."""

    tensors: dict[str, TensorEntry]
    blobs: dict[str, BlobEntry]
    planner_data: dict[str, tuple]


def parse_metadata(data: bytes, *, what: str = ".metadata") -> DcpEntries:
    """The tensors, non-tensor entries and nested paths of a `.metadata`. Nothing in it is trusted; nothing is run."""
    root = safe_load(data, _STUBS, what=what, max_bytes=_MAX_METADATA_BYTES)
    if not isinstance(root, _Metadata):
        raise CheckpointError(f"{what}: holds a {type(root).__name__}, not DCP's Metadata")
    try:
        return _entries(root.state, what)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{what}: damaged, or of an unknown version ({type(error).__name__}: {error})") from error


def _entries(state: dict[str, Any], what: str) -> DcpEntries:
    places = _places(state["storage_data"], what)
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, BlobEntry] = {}
    missing: list[str] = []
    for fqn, entry in state["state_dict_metadata"].items():
        if type(fqn) is not str:
            raise ValueError(f"a key that is no name: {fqn!r}")
        if isinstance(entry, _Bytes):
            place = places.pop((fqn, None), None)
            if place is None:
                missing.append(fqn)
            else:
                blobs[fqn] = BlobEntry(fqn, *place)
            continue
        shape, dtype = _integers(entry.state["size"]), _dtype(entry.state["properties"], fqn, what)
        chunks = []
        for chunk in entry.state["chunks"]:
            box = Box(_integers(chunk.state["offsets"]), _integers(chunk.state["sizes"]))
            place = places.pop((fqn, box.offsets), None)
            if place is not None:
                file, offset, length = place
                chunks.append(Chunk(box, file, UNLOCATED, (), item=(offset, length)))
            elif box.num_elements:  # ranks without a share of a tensor leave empty chunks, which may share an item
                missing.append(f"{fqn} at {box.offsets}")
        tensors[fqn] = TensorEntry(fqn, dtype, shape, tuple(chunks))
    if missing:
        raise CheckpointError(f"{what}: says nowhere where these lie:{list_offenders(missing)}")
    if places:
        names = [fqn if offset is None else f"{fqn} at {offset}" for fqn, offset in places]
        raise CheckpointError(f"{what}: places items that it does not list:{list_offenders(names)}")
    planner_data = state.get("planner_data")
    paths = {k: v for k, v in planner_data.items() if type(v) is tuple} if isinstance(planner_data, dict) else {}
    return DcpEntries(tensors, blobs, paths)


def _places(storage_data: dict[Any, Any], what: str) -> dict[tuple, tuple[str, int, int]]:
    places: dict[tuple, tuple[str, int, int]] = {}
    files: dict[str, str] = {}  # one string per file, checked once
    coded = []
    for index, info in storage_data.items():
        fqn, offset = index.state["fqn"], index.state.get("offset")
        key = (fqn, None if offset is None else _integers(offset))
        name = info.state["relative_path"]
        if name not in files:
            files[name] = checked_file_name(name, what=what)
        start, length = _integers((info.state["offset"], info.state["length"]))
        if info.state.get("transform_descriptors"):
            coded.append(f"{fqn}: {info.state['transform_descriptors']}")
        if key in places:
            raise CheckpointError(f"{what}: places {fqn} at {key[1]} twice")
        places[key] = (files[name], start, length)
    if coded:
        raise UnsupportedError(
            f"{what}: entries are compressed or encoded:{list_offenders(coded)}",
            hint="save the checkpoint without `_extensions` to read it here",
        )
    return places


def _integers(values: Any) -> tuple[int, ...]:
    values = tuple(values)
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} where a size belongs")
    return values


def _dtype(properties: _Properties, fqn: str, what: str) -> str:
    dtype, layout = properties.state[0], properties.state[1]
    if not isinstance(dtype, DTypeName):
        raise CheckpointError(f"{what}: {fqn} has no element type")
    if not isinstance(layout, _Ignored) or layout.arguments != ("torch.strided",):
        raise UnsupportedError(f"{what}: {fqn} is a sparse tensor")
    return dtype.name


def dump_metadata(catalog: Catalog) -> bytes:
    """The `.metadata` of a catalog whose chunks all carry `item`: protocol 4, version 1.0.0, no Path in it."""
    out = _Emitter()
    out.record(_METADATA, "Metadata")
    out.mark()
    out.text("state_dict_metadata")
    out.mapping()
    for entry in catalog.tensors.values():
        out.text(entry.fqn)
        _emit_tensor(out, entry)
    for fqn in catalog.blobs:
        out.text(fqn)
        out.record(_METADATA, "BytesStorageMetadata")
    out.end_mapping()
    out.text("planner_data")
    out.mapping()
    for fqn in (*catalog.tensors, *catalog.blobs):
        out.text(fqn)
        out.path(catalog.planner_data.get(fqn, (fqn,)))
    out.end_mapping()
    out.text("storage_data")
    out.mapping()
    for entry in catalog.tensors.values():
        for index, chunk in enumerate(entry.chunks):
            assert chunk.item is not None, f"{entry.fqn}: a chunk without its item cannot be written to .metadata"
            _emit_place(out, entry.fqn, chunk.box.offsets, index, chunk.file, *chunk.item)
    for blob in catalog.blobs.values():
        _emit_place(out, blob.fqn, None, None, blob.file, blob.byte_offset, blob.length)
    out.end_mapping()
    for name, value in (("storage_meta", None), ("version", VERSION)):
        out.text(name)
        out.none() if value is None else out.text(value)
    out.end_state()
    return out.finish()


def _emit_tensor(out: "_Emitter", entry: TensorEntry) -> None:
    out.record(_METADATA, "TensorStorageMetadata")
    out.mark()
    out.text("properties")
    out.properties(entry.dtype)
    out.text("size")
    out.size(entry.shape)
    out.text("chunks")
    out.list_of_boxes([chunk.box for chunk in entry.chunks])
    out.end_state()


def _emit_place(out: "_Emitter", fqn: str, offsets, index, file: str, start: int, length: int) -> None:
    out.record(_METADATA, "MetadataIndex")
    out.mark()
    out.text("fqn")
    out.text(fqn)
    out.text("index")
    out.none() if index is None else out.integer(index)
    if offsets is not None:
        out.text("offset")
        out.size(offsets)
    out.end_state()
    out.record(_FILESYSTEM, "_StorageInfo")
    out.mark()
    out.text("relative_path")
    out.text(file)
    out.text("offset")
    out.integer(start)
    out.text("length")
    out.integer(length)
    out.end_state()


class _Emitter:
    """Writes pickle opcodes. What repeats (names, classes, sizes) is put into the memo once and fetched afterwards."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x04")
        self._memo: dict[Any, int] = {}

    def _remembered(self, key: Any) -> bool:
        number = self._memo.get(key)
        if number is None:
            return False
        self._out += b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def _remember(self, key: Any) -> None:
        self._memo[key] = len(self._memo)
        self._out += b"\x94"

    def text(self, value: str) -> None:
        if not self._remembered(value):
            raw = value.encode("utf-8", "surrogatepass")
            self._out += b"X" + struct.pack("<I", len(raw)) + raw
            self._remember(value)

    def integer(self, value: int) -> None:
        if value < 256:
            self._out += b"K%c" % value
        elif value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            self._out += b"\x8a\x09" + value.to_bytes(9, "little")

    def none(self) -> None:
        self._out += b"N"

    def mark(self) -> None:
        """Open the state dict of the record just made."""
        self._out += b"}("

    mapping = mark

    def end_mapping(self) -> None:
        self._out += b"u"

    def end_state(self) -> None:
        self._out += b"ub"

    def symbol(self, module: str, name: str) -> None:
        if not self._remembered((module, name)):
            self.text(module)
            self.text(name)
            self._out += b"\x93"
            self._remember((module, name))

    def record(self, module: str, name: str) -> None:
        self.symbol(module, name)
        self._out += b")\x81"

    def size(self, values: tuple[int, ...]) -> None:
        key = ("size", values)
        if not self._remembered(key):
            self.symbol("torch", "Size")
            self._out += b"("
            for value in values:
                self.integer(value)
            self._out += b"t\x85R"
            self._remember(key)

    def properties(self, dtype: str) -> None:
        key = ("properties", dtype)
        if not self._remembered(key):
            self.record(_METADATA, "TensorProperties")
            self._out += b"("
            self.symbol("torch", dtype)
            self.symbol("torch.serialization", "_get_layout")
            self.text("torch.strided")
            self._out += b"\x85R\x89"
            self.symbol(_METADATA, "_MEM_FORMAT_ENCODING")
            self._out += b"K\x00\x85R\x89tb"
            self._remember(key)

    def list_of_boxes(self, boxes: list[Box]) -> None:
        self._out += b"]("
        for box in boxes:
            self.record(_METADATA, "ChunkStorageMetadata")
            self.mark()
            self.text("offsets")
            self.size(box.offsets)
            self.text("sizes")
            self.size(box.sizes)
            self.end_state()
        self._out += b"e"

    def path(self, parts: tuple) -> None:
        self._out += b"("
        for part in parts:
            self.integer(part) if type(part) is int else self.text(str(part))
        self._out += b"t"

    def finish(self) -> bytes:
        return bytes(self._out + b".")
