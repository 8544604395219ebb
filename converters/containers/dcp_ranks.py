"""DCP saved without rank coordination (`use_collectives=False`): one `__N.metadata` per rank, joined.

Such checkpoints are not deduplicated: what several ranks hold (norms under HSDP, counters) is in every rank's file.
Copies are dropped only if their CRC32s agree.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.containers.dcp_item import ItemData, read_blob_item, read_item
from converters.containers.dcp_metadata import DcpEntries
from converters.containers.dcp_names import RANK_DATA, RANK_METADATA
from converters.store.base import Store, read_bytes, reading_part
from converters.views.catalog import Chunk, Item, TensorEntry


def check_ranks(store: Store, names: Sequence[str]) -> None:
    """Raise CheckpointError if a rank's metadata is missing: between others, or for a rank with data."""
    found = {int(match[1]) for name in names if (match := RANK_METADATA.fullmatch(name))}
    with_data = {int(match[1]) for name in names if (match := RANK_DATA.fullmatch(name))}
    if missing := sorted((with_data | set(range(max(found)))) - found):
        raise CheckpointError(
            f"{store.location}: metadata of ranks is missing:"
            + list_offenders([f"__{rank}.metadata" for rank in missing]),
            hint="the save was interrupted, or the files were not copied",
        )


def join_ranks(store: Store, ranks: Sequence[DcpEntries]) -> DcpEntries:
    """Join the lists of all ranks. Raises CheckpointError if ranks hold different data under one name."""
    tensors: dict[str, TensorEntry] = {}
    items: dict[str, Item] = {}
    planner_data: dict[str, tuple[Any, ...]] = {}
    problems: list[str] = []
    for entries in ranks:
        planner_data |= entries.planner_data
        for fqn, entry in entries.tensors.items():
            joined = tensors.setdefault(fqn, TensorEntry(fqn, entry.dtype, entry.shape, ()))
            if (joined.dtype, joined.shape) != (entry.dtype, entry.shape):
                problems.append(f"{fqn}: {joined.dtype} {list(joined.shape)} and {entry.dtype} {list(entry.shape)}")
                continue
            chunks = {chunk.box: chunk for chunk in joined.chunks}
            fresh = [chunk for chunk in entry.chunks if chunk.box not in chunks and chunk.box.num_elements]
            for chunk in entry.chunks:
                if chunk.box in chunks and (why := _chunks_differ(store, fqn, chunks[chunk.box], chunk)):
                    problems.append(f"{fqn} at {list(chunk.box.offsets)} in {chunk.file}: {why}")
            tensors[fqn] = TensorEntry(fqn, entry.dtype, entry.shape, (*joined.chunks, *fresh))
        for fqn, item in entries.items.items():
            if not _same_value(store, items.setdefault(fqn, item), item):
                problems.append(f"{fqn}: another value in {item.file} than in {items[fqn].file}")
    if problems:
        raise UnsupportedError(
            f"{store.location}: saved without rank coordination, and ranks hold different data under one name:"
            + list_offenders(problems),
            hint="load it in a job of as many ranks and save it again without use_collectives=False",
        )
    return DcpEntries(tensors, items, planner_data)


def _chunks_differ(store: Store, fqn: str, one: Chunk, other: Chunk) -> str:
    a, b = _item(store, fqn, one), _item(store, fqn, other)
    if (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides) or a.record[1] != b.record[1]:
        return f"not laid out as in {one.file}"
    if a.crc32 is None or b.crc32 is None:
        return f"may be a copy of that in {one.file}, but there is no CRC32 to compare"
    return "" if a.crc32 == b.crc32 else f"other values than in {one.file}"


def _item(store: Store, fqn: str, chunk: Chunk) -> ItemData:
    assert chunk.item is not None
    start, length = chunk.item
    what = f"{store.location / chunk.file}: {fqn} at {list(chunk.box.offsets)}"
    return read_item(reading_part(store, chunk.file, start, length), length, what=what)


def _same_value(store: Store, one: Item, other: Item) -> bool:
    if one is other:
        return True
    left, right = (read_bytes(store, item.file, item.byte_offset, item.length) for item in (one, other))
    if left == right:
        return True
    with suppress(CheckpointError):  # two encodings of one plain value
        a, b = read_blob_item(left), read_blob_item(right)
        return type(a) is type(b) and a == b
    return False
