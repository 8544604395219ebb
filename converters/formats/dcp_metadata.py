"""DCP's `.metadata`: read it with stand-in records, write it by emitting opcodes. torch is not imported either way."""

from typing import Any, NamedTuple

from converters.catalog import UNLOCATED, BlobEntry, Box, Catalog, Chunk, TensorEntry
from converters.dtypes import DTYPES
from converters.errors import CheckpointError, UnsupportedError, in_words, list_offenders
from converters.formats.dcp_opcodes import FILESYSTEM_MODULE, METADATA_MODULE, MetadataEmitter
from converters.formats.paths import checked_file_name
from converters.formats.safe_pickle import PLAIN_STUBS, Sealed, Stubs, safe_load
from converters.formats.tensor_pickle import DTypeName

_MAX_METADATA_BYTES = 8 << 30  # 10,000 ranks of a 405B write 6.7 GB
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
    (METADATA_MODULE, "Metadata"): _Metadata,
    (METADATA_MODULE, "TensorStorageMetadata"): _Tensor,
    (METADATA_MODULE, "BytesStorageMetadata"): _Bytes,
    (METADATA_MODULE, "ChunkStorageMetadata"): _ChunkBox,
    (METADATA_MODULE, "TensorProperties"): _Properties,
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _Ignored,
    (METADATA_MODULE, "StorageMeta"): _Ignored,
    (METADATA_MODULE, "MetadataIndex"): _Index,
    (FILESYSTEM_MODULE, "_StorageInfo"): _StorageInfo,
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
        raise CheckpointError(f"{what}: damaged, or of an unknown version ({in_words(error)})") from error


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
    out = MetadataEmitter()
    out.record(METADATA_MODULE, "Metadata")
    out.text("state_dict_metadata")
    out.mapping()
    for entry in catalog.tensors.values():
        out.text(entry.fqn)
        _emit_tensor(out, entry)
    for fqn in catalog.blobs:
        out.text(fqn)
        out.bare_record(METADATA_MODULE, "BytesStorageMetadata")
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
    out.end_record()
    return out.finish()


def _emit_tensor(out: MetadataEmitter, entry: TensorEntry) -> None:
    out.record(METADATA_MODULE, "TensorStorageMetadata")
    out.text("properties")
    out.properties(entry.dtype)
    out.text("size")
    out.size(entry.shape)
    out.text("chunks")
    out.list_of_boxes([chunk.box for chunk in entry.chunks])
    out.end_record()


def _emit_place(out: MetadataEmitter, fqn: str, offsets, index, file: str, start: int, length: int) -> None:
    out.record(METADATA_MODULE, "MetadataIndex")
    out.text("fqn")
    out.text(fqn)
    out.text("index")
    out.none() if index is None else out.integer(index)
    if offsets is not None:
        out.text("offset")
        out.size(offsets)
    out.end_record()
    out.record(FILESYSTEM_MODULE, "_StorageInfo")
    out.text("relative_path")
    out.text(file)
    out.text("offset")
    out.integer(start)
    out.text("length")
    out.integer(length)
    out.end_record()
