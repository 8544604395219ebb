"""Open a DCP folder as a catalog: metadata only; the items are located when they are read."""

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.common.names import DCP_METADATA
from converters.containers.base import Container, Listing
from converters.containers.dcp_metadata import DcpEntries, parse_metadata
from converters.containers.dcp_names import DATA_SUFFIX, metadata_files, rank_metadata_files
from converters.containers.dcp_ranks import check_ranks, join_ranks
from converters.containers.sniff import first_bytes, is_safetensors, refuse_foreign_files
from converters.store.base import Store, read_bytes
from converters.views.catalog import Catalog, Value
from converters.views.cover import require_cover


def read_catalog(store: Store) -> Catalog:
    """The catalog of a DCP folder. Raises CheckpointError, listing every file that is missing or too short."""
    names = store.names()
    if DCP_METADATA in names:
        return read_complete(store)
    check_ranks(store, names)
    ranks = [_read_metadata(store, name) for name in rank_metadata_files(names)]
    _check_extents(store, ranks)
    return _catalog(store, join_ranks(store, ranks))


def read_complete(store: Store) -> Catalog:
    """The catalog of a DCP folder with `.metadata`, which is read by its name: a list may not have it yet."""
    entries = _read_metadata(store, DCP_METADATA)
    _check_extents(store, [entries])
    return _catalog(store, entries)


def _catalog(store: Store, entries: DcpEntries) -> Catalog:
    values = {name: Value(item=item) for name, item in entries.items.items()}
    return Catalog(store, "dcp", entries.tensors, values, entries.planner_data)


def _read_metadata(store: Store, name: str) -> DcpEntries:
    return parse_metadata(read_bytes(store, name), what=str(store.location / name))


def _check_extents(store: Store, ranks: list[DcpEntries]) -> None:
    """Check that every file exists and is long enough for its items."""
    ends: dict[str, int] = {}
    for entries in ranks:
        for entry in entries.tensors.values():
            for chunk in entry.chunks:
                assert chunk.item is not None
                offset, length = chunk.item
                ends[chunk.file] = max(ends.get(chunk.file, 0), offset + length)
        for item in entries.items.values():
            ends[item.file] = max(ends.get(item.file, 0), item.byte_offset + item.length)
    problems = []
    for file, end in ends.items():
        try:
            size = store.size(file)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        if size < end:
            problems.append(f"{store.location / file}: {size:,} bytes, but .metadata places items up to byte {end:,}")
    if problems:
        raise CheckpointError(
            f"{store.location}: the checkpoint is incomplete:{list_offenders(problems)}",
            hint="it was truncated while being written or copied; use another copy",
        )
    if ends:
        _refuse_safetensors_inside(store, next(iter(ends)))


def _refuse_safetensors_inside(store: Store, file: str) -> None:
    """FileSystemWriter(serialization_format=SAFETENSORS) writes what neither dcp.load nor safetensors can read."""
    start = first_bytes(store, file)
    if start[:2] != b"PK" and is_safetensors(start):
        raise UnsupportedError(
            f"{store.location / file}: a safetensors body inside of a DCP file, which torch itself cannot load",
            hint="it was saved with SerializationFormat.SAFETENSORS; save it again without, or with "
            "HuggingFaceStorageWriter",
        )


def _find(files: Listing) -> str:
    return f"DCP ({marks[0]})" if (marks := metadata_files(files.names)) else ""


def _open_folder(files: Listing) -> Catalog:
    refuse_foreign_files(files.store, metadata_files(files.names), pickles=True)
    return require_cover(read_catalog(files.store))


DCP = Container(
    name="dcp",
    called="a DCP checkpoint",
    title="DCP",
    suffixes=(DATA_SUFFIX,),
    find=_find,
    open_folder=_open_folder,
    index_suffixes=(DCP_METADATA,),  # a rank's, too
    marks=metadata_files,
    replaceable=(DCP_METADATA, f"*{DATA_SUFFIX}"),
    stands_alone=True,
    keeps_state=True,
    keeps_sections=True,
)
