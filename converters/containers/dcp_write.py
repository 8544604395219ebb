"""Plan a DCP output: items of given boxes in given files, blobs in one small file, `.metadata` at the end."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

from converters.common.box import Box, TensorInfo
from converters.common.collector import collector_paused
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import DCP_METADATA
from converters.containers.dcp_item import item_layout, item_pieces
from converters.containers.dcp_metadata import dump_places
from converters.containers.dcp_names import BLOB_FILE
from converters.containers.dcp_opcodes import StorageLocation
from converters.containers.target import Crc32Of, Slot, Target
from converters.store.paths import checked_file_name
from converters.views.catalog import UNLOCATED, Chunk, TensorEntry
from converters.views.cover import cover_problem


@collector_paused()
def plan_dcp(
    tensors: Mapping[str, TensorInfo],
    files: Mapping[str, Sequence[tuple[str, Box]]],
    *,
    blobs: Mapping[str, bytes] | None = None,
    planner_data: Mapping[str, tuple[Any, ...]] | None = None,
    streamed: bool = False,
) -> Target:
    """A Target for DCP: for each file the boxes in it, in order; `blobs` are finished items (see `blob_item`).
    `streamed`: see Target.

    Raises CheckpointError unless the boxes cover every tensor exactly once.
    """
    layout_of = cache(partial(item_layout, streamed=streamed))
    slots: list[Slot] = []
    file_bytes: dict[str, int] = {}
    places: dict[str, list[StorageLocation]] = {fqn: [] for fqn in tensors}
    for file, boxes in files.items():
        position = 0
        for fqn, box in boxes:
            dtype = tensors[fqn].dtype
            layout = layout_of(dtype, box.sizes)
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

    boxes_of = {file: len(boxes) for file, boxes in files.items()}
    firsts = dict(zip(boxes_of, accumulate(boxes_of.values(), initial=0), strict=False))

    def around(file: str, crc32_of: Crc32Of) -> Iterator[tuple[int, bytes]]:
        for number in range(boxes_of[file]):
            slot = slots[firsts[file] + number]
            layout = layout_of(slot.dtype, slot.box.sizes)
            start = slot.byte_offset - layout.data_offset
            for offset, data in item_pieces(slot.dtype, slot.box.sizes, partial(crc32_of, number), streamed=streamed):
                yield start + offset, data

    other_files = {BLOB_FILE: b"".join(blobs.values())} if blobs else {}
    other_files[DCP_METADATA] = metadata  # last: for stock DCP a folder without it is not a checkpoint
    return Target(dict(tensors), slots, file_bytes, around, other_files, streamed)


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
