"""Open a DCP folder as a catalog: `.metadata` only; the items are located when they are read."""

from pathlib import Path

from converters.catalog import Catalog
from converters.errors import CheckpointError, list_offenders
from converters.formats.dcp_metadata import parse_metadata
from converters.formats.paths import checked_file_size
from converters.names import DCP_METADATA


def read_catalog(path: Path) -> Catalog:
    """The catalog of a DCP folder. Raises CheckpointError, listing every file that is missing or too short."""
    metadata = path / DCP_METADATA
    checked_file_size(path, DCP_METADATA)
    entries = parse_metadata(metadata.read_bytes(), what=str(metadata))
    ends: dict[str, int] = {}
    for entry in entries.tensors.values():
        for chunk in entry.chunks:
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
            f"{path}: the checkpoint is not whole:{list_offenders(problems)}",
            hint="it was cut off while being written or copied; use another copy of it",
        )
    return Catalog(path, "dcp", entries.tensors, entries.blobs, entries.planner_data)
