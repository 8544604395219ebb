"""Read DCP's `.metadata` with stub records, and write it by emitting opcodes; both without torch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from converters.common.box import Box, TensorInfo
from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, UnsupportedError, in_words, list_offenders
from converters.containers.dcp_opcodes import FILESYSTEM_MODULE, METADATA_MODULE, MetadataEmitter, StorageLocation
from converters.containers.safe_pickle import PLAIN_STUBS, Sealed, Stubs, safe_load
from converters.containers.tensor_pickle import UNCOVERED_DTYPES, DTypeName
from converters.store.paths import checked_file_name
from converters.views.catalog import UNLOCATED, Catalog, Chunk, Item, TensorEntry

_MAX_METADATA_BYTES = 8 << 30  # 10,000 ranks of a 405B write 6.7 GB
VERSION = "1.0.0"


class _Record(metaclass=Sealed):
    """Stub of one of DCP's dataclasses: keeps the state that the pickle sets, calls nothing."""

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


class _TensorProperties(_Record):
    __slots__ = ()


class _Index(_Record):
    __slots__ = ()


class _StorageInfo(_Record):
    __slots__ = ()


class _Ignored(metaclass=Sealed):
    """Stub of classes that do not describe the data: paths, layouts, memory formats, StorageMeta."""

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
    (METADATA_MODULE, "TensorProperties"): _TensorProperties,
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _Ignored,
    (METADATA_MODULE, "StorageMeta"): _Ignored,
    (METADATA_MODULE, "MetadataIndex"): _Index,
    (FILESYSTEM_MODULE, "_StorageInfo"): _StorageInfo,
    # torch before 2.2 and OLMo-core: the same records under other names
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _TensorProperties,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Ignored,
    **{
        (f"torch.distributed._shard.checkpoint.{module}", name): stub
        for module, name, stub in (
            ("metadata", "Metadata", _Metadata),
            ("metadata", "TensorStorageMetadata", _Tensor),
            ("metadata", "BytesStorageMetadata", _Bytes),
            ("metadata", "ChunkStorageMetadata", _ChunkBox),
            ("metadata", "MetadataIndex", _Index),
            ("filesystem", "_StorageInfo", _StorageInfo),
        )
    },
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("torch", "Size"): tuple,  # harmless, and four times as fast as a function
    # A checkpoint_id that was a Path; `pathlib._local` in Python 3.13
    **{
        (module, name): _Ignored
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
    },
    **{("torch", name): DTypeName(name) for name in (*DTYPES, *UNCOVERED_DTYPES)},
}


class DcpEntries(NamedTuple):
    """The entries of a `.metadata`. Their chunks are not located yet (see `Chunk.item`)."""

    tensors: dict[str, TensorEntry]
    items: dict[str, Item]  # of the values
    planner_data: dict[str, tuple[Any, ...]]


def parse_metadata(data: bytes, *, what: str = ".metadata") -> DcpEntries:
    """The tensors, non-tensor entries and nested paths of a `.metadata`. Nothing in it is trusted or executed."""
    root = safe_load(data, _STUBS, what=what, max_bytes=_MAX_METADATA_BYTES)
    del data  # of 10,000 ranks it has gigabytes, like the unpickled records, which `_entries` consumes
    if not isinstance(root, _Metadata):
        raise CheckpointError(f"{what}: holds a {type(root).__name__}, not DCP's Metadata")
    try:
        return _entries(root.state, what)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{what}: damaged, or of an unknown version ({in_words(error)})") from error


def _entries(state: dict[str, Any], what: str) -> DcpEntries:
    locations = _places(state.pop("storage_data"), what)
    tensors: dict[str, TensorEntry] = {}
    items: dict[str, Item] = {}
    missing: list[str] = []
    unsupported: list[str] = []
    for fqn, entry in state["state_dict_metadata"].items():
        if type(fqn) is not str:
            raise ValueError(f"a key that is not a name: {fqn!r}")
        if isinstance(entry, _Bytes):
            location = locations.pop((fqn, None), None)
            if location is None:
                missing.append(fqn)
            else:
                items[fqn] = Item(*location)
            continue
        if not isinstance(entry, _Tensor):
            raise ValueError(f"{fqn} is neither a tensor nor bytes")
        shape, dtype = _integers(entry.state["size"]), _dtype(entry.state["properties"], fqn)
        if dtype not in DTYPES:
            unsupported.append(f"{fqn}: {dtype}")
        chunks = []
        for chunk in entry.state["chunks"]:
            box = Box(_integers(chunk.state["offsets"]), _integers(chunk.state["sizes"]))
            location = locations.pop((fqn, box.offsets), None)
            if location is not None:
                file, offset, length = location
                chunks.append(Chunk(box, file, UNLOCATED, (), item=(offset, length)))
            elif box.num_elements:  # ranks without a part of a tensor write empty chunks, which may share an item
                missing.append(f"{fqn} at {box.offsets}")
        tensors[fqn] = TensorEntry(fqn, dtype, shape, tuple(chunks))
    if unsupported:
        raise UnsupportedError(
            f"{what}: entries of a kind that is not covered:{list_offenders(unsupported)}",
            hint="convert them to plain tensors in the program that made them, and save again",
        )
    if missing:
        raise CheckpointError(f"{what}: has no location of these:{list_offenders(missing)}")
    if locations:
        names = [fqn if offset is None else f"{fqn} at {offset}" for fqn, offset in locations]
        raise CheckpointError(f"{what}: has locations of items that it does not list:{list_offenders(names)}")
    planner_data = state.get("planner_data")
    paths = {k: v for k, v in planner_data.items() if type(v) is tuple} if isinstance(planner_data, dict) else {}
    return DcpEntries(tensors, items, paths)


def _places(storage_data: dict[Any, Any], what: str) -> dict[tuple[Any, ...], tuple[str, int, int]]:
    places: dict[tuple[Any, ...], tuple[str, int, int]] = {}
    files: dict[str, str] = {}  # one string per file, checked once
    coded: list[str] = []
    twice: list[str] = []
    strange: list[str] = []
    while storage_data:
        index, info = storage_data.popitem()
        fqn, offset = index.state["fqn"], index.state.get("offset")
        key = (fqn, None if offset is None else _integers(offset))
        name = info.state["relative_path"]
        if name not in files:
            try:
                files[name] = checked_file_name(name, what=what)
            except CheckpointError:
                files[name] = ""
                strange.append(f"{str(name)!r:.200}")
        start, length = _integers((info.state["offset"], info.state["length"]))
        if info.state.get("transform_descriptors"):
            coded.append(f"{fqn}: {info.state['transform_descriptors']}")
        if key in places:
            twice.append(f"{fqn} at {key[1]}")
        places[key] = (files[name], start, length)
    if strange:
        raise CheckpointError(
            f"{what}: names files that may lie outside the checkpoint's folder:{list_offenders(strange)}",
            hint="files of a checkpoint are in one folder, under plain names; nothing was opened",
        )
    if twice:
        raise CheckpointError(f"{what}: has two locations of these:{list_offenders(twice)}")
    if coded:
        raise UnsupportedError(
            f"{what}: entries are compressed or encoded, which cannot be read here:{list_offenders(coded)}",
            hint="load it with dcp.load and FileSystemReader(…, _extension_registry=…) once, and save it again with "
            "dcp.save without `_extensions`",
        )
    return places


def _integers(values: Any) -> tuple[int, ...]:
    checked: tuple[int, ...] = tuple(values)
    for value in checked:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is not a size")
    return checked


def _dtype(properties: _TensorProperties, fqn: str) -> str:
    """The element type, or the reason why the tensor cannot be read, which is not in DTYPES."""
    dtype, layout = properties.state[0], properties.state[1]
    if not isinstance(dtype, DTypeName):
        raise ValueError(f"{fqn} has no element type")
    if not isinstance(layout, _Ignored) or layout.arguments != ("torch.strided",):
        return "a sparse tensor"
    return dtype.name


def dump_metadata(catalog: Catalog) -> bytes:
    """The `.metadata` of a catalog whose chunks all carry `item`: protocol 4, version 1.0.0, no Path in it."""
    places: dict[str, list[StorageLocation]] = {}
    for entry in catalog.tensors.values():
        assert all(c.item is not None for c in entry.chunks), f"{entry.fqn}: a chunk without an item"
        places[entry.fqn] = [
            StorageLocation(chunk.box, chunk.file, *chunk.item) for chunk in entry.chunks if chunk.item
        ]
    for fqn, item in catalog.items.items():
        places[fqn] = [StorageLocation(None, item.file, item.byte_offset, item.length)]
    tensors = {fqn: TensorInfo(entry.dtype, entry.shape) for fqn, entry in catalog.tensors.items()}
    return dump_places(tensors, places, planner_data=catalog.planner_data)


def dump_places(
    tensors: Mapping[str, TensorInfo],
    places: Mapping[str, Sequence[StorageLocation]],
    *,
    planner_data: Mapping[str, tuple[Any, ...]],
) -> bytes:
    """The `.metadata` of tensors, and of plain values: those in `places` that are not in `tensors`."""
    out = MetadataEmitter()
    parts = [out.start, out.record(METADATA_MODULE, "Metadata"), out.text("state_dict_metadata"), out.mapping]
    for fqn, info in tensors.items():
        parts += (
            out.text(fqn),
            out.record(METADATA_MODULE, "TensorStorageMetadata"),
            out.text("properties"),
            out.properties(info.dtype),
            out.text("size"),
            out.size(info.shape),
            out.text("chunks"),
            out.list_of_boxes([item.box for item in places[fqn] if item.box is not None]),
            out.end_record,
        )
    for fqn in (name for name in places if name not in tensors):
        parts += (out.text(fqn), out.bare_record(METADATA_MODULE, "BytesStorageMetadata"))
    parts += (out.end_mapping, out.text("planner_data"), out.mapping)
    for fqn in places:
        parts += (out.text(fqn), out.path(planner_data.get(fqn, (fqn,))))
    parts += (out.end_mapping, out.text("storage_data"), out.mapping)
    parts += [out.places(fqn, stored) for fqn, stored in places.items()]
    parts += (out.end_mapping, out.text("storage_meta"), out.none, out.text("version"), out.text(VERSION))
    parts += (out.end_record, out.stop)
    return b"".join(parts)
