"""Plan a DCP output: items of given boxes in given files, blobs in one small file, `.metadata` at the end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from converters.common.box import Box, TensorInfo
from converters.common.collector import collector_paused
from converters.common.crc import crc32
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import DCP_METADATA
from converters.containers.dcp_item import item_layout, item_shell
from converters.containers.dcp_metadata import dump_places
from converters.containers.dcp_opcodes import StorageLocation
from converters.containers.target import ChecksummedRange, Slot, Target, joined, write_at, write_file
from converters.store.manifest import FileSum
from converters.store.paths import checked_file_name
from converters.views.catalog import UNLOCATED, Chunk, TensorEntry
from converters.views.cover import cover_problem

BLOB_FILE = "__blobs_0.distcp"  # small, so that ranks which need a step counter do not open each other's data files


@collector_paused()
def plan_dcp(
    tensors: Mapping[str, TensorInfo],
    files: Mapping[str, Sequence[tuple[str, Box]]],
    *,
    blobs: Mapping[str, bytes] | None = None,
    planner_data: Mapping[str, tuple[Any, ...]] | None = None,
) -> Target:
    """A Target for DCP: for each file the boxes in it, in order; `blobs` are finished items (see `blob_item`).

    Raises CheckpointError unless the boxes cover every tensor exactly once.
    """
    slots: list[Slot] = []
    file_bytes: dict[str, int] = {}
    places: dict[str, list[StorageLocation]] = {fqn: [] for fqn in tensors}
    for file, boxes in files.items():
        position = 0
        for fqn, box in boxes:
            dtype = tensors[fqn].dtype
            layout = item_layout(dtype, box.sizes)
            slots.append(Slot(fqn, dtype, box, file, position + layout.data_offset))
            places[fqn].append(StorageLocation(box, file, position, layout.total_bytes))
            position += layout.total_bytes
        file_bytes[checked_file_name(file, what="a DCP layout")] = position
    _check(tensors, places)
    blobs = dict(blobs or {})
    if blobs:
        assert BLOB_FILE not in file_bytes, f"{BLOB_FILE} is taken"
        assert blobs.keys().isdisjoint(tensors), "a name of both a tensor and a plain value"
        file_bytes[BLOB_FILE] = sum(map(len, blobs.values()))
        starts = accumulate(map(len, blobs.values()), initial=0)
        places |= {
            n: [StorageLocation(None, BLOB_FILE, s, len(d))] for (n, d), s in zip(blobs.items(), starts, strict=False)
        }
    metadata = dump_places(tensors, places, planner_data=planner_data or {})
    file_bytes[DCP_METADATA] = len(metadata)

    def finish(folder: Path, crcs: Sequence[int]) -> dict[str, FileSum]:
        sums = {}
        filled = iter(zip(slots, crcs, strict=True))
        for file, boxes in files.items():  # file by file: heads and tails of 470,000 items have a third of a gigabyte
            pieces: list[tuple[int, bytes]] = []
            segments: list[ChecksummedRange] = []
            for slot, crc in islice(filled, len(boxes)):
                layout = item_layout(slot.dtype, slot.box.sizes)
                head, tail = item_shell(slot.dtype, slot.box.sizes, crc)
                start, end = slot.byte_offset - len(head), slot.byte_offset + layout.data_bytes
                pieces += [(start, head), (end, tail)]
                segments += [
                    ChecksummedRange(start, len(head), crc32(head)),
                    ChecksummedRange(slot.byte_offset, layout.data_bytes, crc),
                    ChecksummedRange(end, len(tail), crc32(tail)),
                ]
            write_at(folder / file, pieces)
            sums[file] = joined(segments)
        if blobs:
            sums[BLOB_FILE] = write_file(folder / BLOB_FILE, b"".join(blobs.values()))
        # Last: for stock DCP a folder without it is not a checkpoint.
        sums[DCP_METADATA] = write_file(folder / DCP_METADATA, metadata)
        return sums

    return Target(dict(tensors), slots, file_bytes, finish)


def _check(tensors: Mapping[str, TensorInfo], places: Mapping[str, Sequence[StorageLocation]]) -> None:
    checked: dict[tuple[int, ...], list[str]] = {}  # layers share their boxes: the result for one is that of all
    problems = []
    for fqn, info in tensors.items():
        boxes = [place.box for place in places[fqn] if place.box is not None]
        key = (*info.shape, -1, *map(id, boxes))
        if key not in checked:
            checked[key] = _problems(info, boxes)
        problems += [f"{fqn}: {problem}" for problem in checked[key]]
    if problems:
        raise CheckpointError(f"the layout does not hold every tensor exactly once:{list_offenders(problems)}")


def _problems(info: TensorInfo, boxes: Sequence[Box]) -> list[str]:
    entry = TensorEntry("", info.dtype, info.shape, tuple(Chunk(box, "", UNLOCATED, ()) for box in boxes))
    problem = cover_problem(entry) or ("" if boxes else "has no chunk")
    twice = [at for at, count in Counter(box.offsets for box in boxes).items() if count > 1]
    return [*([problem] if problem else []), *(f"two chunks at {at}" for at in twice)]
