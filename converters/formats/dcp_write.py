"""Plan a DCP output: items of given boxes in given files, blobs in one small file, `.metadata` at the end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

from converters.catalog import UNLOCATED, BlobEntry, Box, Catalog, Chunk, TensorEntry, TensorInfo
from converters.cover import cover_problem
from converters.errors import CheckpointError, list_offenders
from converters.formats.dcp_item import item_layout, item_shell
from converters.formats.dcp_metadata import dump_metadata
from converters.formats.paths import checked_file_name
from converters.formats.target import Segment, Slot, Target, joined
from converters.formats.write_at import write_at, write_file
from converters.manifest import FileSum
from converters.names import DCP_METADATA

BLOB_FILE = "__blobs_0.distcp"  # small, so that ranks which need a step counter do not open each other's data files


def plan_dcp(
    tensors: Mapping[str, TensorInfo],
    files: Mapping[str, Sequence[tuple[str, Box]]],
    *,
    blobs: Mapping[str, bytes] | None = None,
    planner_data: Mapping[str, tuple] | None = None,
) -> Target:
    """A Target for DCP: for each file the boxes in it, in order; `blobs` are finished items (see `blob_item`).

    Raises CheckpointError unless the boxes cover every tensor exactly once.
    """
    slots: list[Slot] = []
    file_bytes: dict[str, int] = {}
    chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in tensors}
    for file, boxes in files.items():
        position = 0
        for fqn, box in boxes:
            dtype = tensors[fqn].dtype
            layout = item_layout(dtype, box.sizes)
            slots.append(Slot(fqn, dtype, box, file, position + layout.data_offset))
            chunks[fqn].append(Chunk(box, file, UNLOCATED, (), item=(position, layout.total_bytes)))
            position += layout.total_bytes
        file_bytes[checked_file_name(file, what="a DCP layout")] = position
    blobs = dict(blobs or {})
    if blobs:
        assert BLOB_FILE not in file_bytes, f"{BLOB_FILE} is taken"
        file_bytes[BLOB_FILE] = sum(map(len, blobs.values()))
    entries = {fqn: TensorEntry(fqn, i.dtype, i.shape, tuple(chunks[fqn])) for fqn, i in tensors.items()}
    _check(entries, blobs)
    catalog = Catalog(Path(), "dcp", entries, _blob_entries(blobs), dict(planner_data or {}))
    metadata = dump_metadata(catalog)
    file_bytes[DCP_METADATA] = len(metadata)

    def finish(folder: Path, crcs: Sequence[int]) -> dict[str, FileSum]:
        segments: dict[str, list[Segment]] = {file: [] for file in files}
        pieces: dict[str, list[tuple[int, bytes]]] = {file: [] for file in files}
        for slot, crc in zip(slots, crcs, strict=True):
            layout = item_layout(slot.dtype, slot.box.sizes)
            head, tail = item_shell(slot.dtype, slot.box.sizes, crc)
            start, end = slot.byte_offset - len(head), slot.byte_offset + layout.data_bytes
            pieces[slot.file] += [(start, head), (end, tail)]
            segments[slot.file] += [
                Segment(start, len(head), crc32(head)),
                Segment(slot.byte_offset, layout.data_bytes, crc),
                Segment(end, len(tail), crc32(tail)),
            ]
        for file, parts in pieces.items():
            write_at(folder / file, parts)
        sums = {file: joined(parts) for file, parts in segments.items()}
        if blobs:
            sums[BLOB_FILE] = write_file(folder / BLOB_FILE, b"".join(blobs.values()))
        # Last: stock DCP takes a folder without it for no checkpoint at all.
        sums[DCP_METADATA] = write_file(folder / DCP_METADATA, metadata)
        return sums

    return Target(dict(tensors), slots, file_bytes, finish)


def _check(entries: Mapping[str, TensorEntry], blobs: Mapping[str, bytes]) -> None:
    problems = [f"{fqn}: {why}" for fqn, entry in entries.items() if (why := cover_problem(entry))]
    problems += [f"{fqn}: a tensor and a blob" for fqn in blobs if fqn in entries]
    for fqn, entry in entries.items():
        twice = [at for at, count in Counter(chunk.box.offsets for chunk in entry.chunks).items() if count > 1]
        problems += [f"{fqn}: two chunks at {at}" for at in twice]
        if not entry.chunks:
            problems.append(f"{fqn}: has no chunk")
    if problems:
        raise CheckpointError(f"the layout does not hold every tensor exactly once:{list_offenders(problems)}")


def _blob_entries(blobs: Mapping[str, bytes]) -> dict[str, BlobEntry]:
    entries, position = {}, 0
    for fqn, data in blobs.items():
        entries[fqn] = BlobEntry(fqn, BLOB_FILE, position, len(data))
        position += len(data)
    return entries
