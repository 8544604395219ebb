"""Open a DCP folder as a catalog: metadata only; the items are located when they are read."""

from pathlib import Path

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.common.names import DCP_METADATA
from converters.containers.base import Container, FolderFiles
from converters.containers.dcp_metadata import DcpEntries, parse_metadata
from converters.containers.dcp_ranks import check_ranks, join_ranks, rank_metadata_files
from converters.containers.sniff import refuse_foreign_files
from converters.store.paths import checked_file_size
from converters.views.catalog import Catalog
from converters.views.cover import require_cover


def read_catalog(path: Path) -> Catalog:
    """The catalog of a DCP folder. Raises CheckpointError, listing every file that is missing or too short."""
    if (path / DCP_METADATA).exists():
        entries = _read_metadata(path, DCP_METADATA)
        _check_extents(path, [entries])
    else:
        names = sorted(entry.name for entry in path.iterdir())
        check_ranks(path, names)
        ranks = [_read_metadata(path, name) for name in rank_metadata_files(names)]
        _check_extents(path, ranks)
        entries = join_ranks(path, ranks)
    return Catalog(path, "dcp", entries.tensors, entries.blobs, entries.planner_data)


def _read_metadata(path: Path, name: str) -> DcpEntries:
    checked_file_size(path, name)
    return parse_metadata((path / name).read_bytes(), what=str(path / name))


def _check_extents(path: Path, ranks: list[DcpEntries]) -> None:
    """Check that every file exists and is long enough for its items."""
    ends: dict[str, int] = {}
    for entries in ranks:
        for entry in entries.tensors.values():
            for chunk in entry.chunks:
                assert chunk.item is not None
                offset, length = chunk.item
                ends[chunk.file] = max(ends.get(chunk.file, 0), offset + length)
        for blob in entries.blobs.values():
            ends[blob.file] = max(ends.get(blob.file, 0), blob.byte_offset + blob.length)
    problems = []
    for file, end in ends.items():
        try:
            size = checked_file_size(path, file)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        if size < end:
            problems.append(f"{path / file}: {size:,} bytes, but .metadata places items up to byte {end:,}")
    if problems:
        raise CheckpointError(
            f"{path}: the checkpoint is incomplete:{list_offenders(problems)}",
            hint="it was truncated while being written or copied; use another copy",
        )
    if ends:
        _refuse_safetensors_inside(path, next(iter(ends)))


def _refuse_safetensors_inside(path: Path, file: str) -> None:
    """FileSystemWriter(serialization_format=SAFETENSORS) writes what neither dcp.load nor safetensors can read."""
    with (path / file).open("rb") as opened:
        start = opened.read(9)
    if start[:2] != b"PK" and start[8:9] == b"{":
        raise UnsupportedError(
            f"{path / file}: a safetensors body inside of a DCP file, which torch itself cannot load",
            hint="it was saved with SerializationFormat.SAFETENSORS; save it again without, or with "
            "HuggingFaceStorageWriter",
        )


def _open_folder(files: FolderFiles) -> Catalog:
    refuse_foreign_files(files.path, files.dcp_metadata, pickles=True)
    return require_cover(read_catalog(files.path))


DCP = Container(
    name="dcp",
    called="a DCP checkpoint",
    title="DCP",
    suffixes=(".distcp",),
    find=lambda files: f"DCP ({files.dcp_metadata[0]})" if files.dcp_metadata else "",
    open_folder=_open_folder,
    keeps_sections=True,
)
