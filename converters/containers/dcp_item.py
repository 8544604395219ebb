"""One item of a `.distcp` file: a torch.save zip with one chunk or one plain value, read and written without torch.

Writing needs only the item's head and tail around the raw data (`item_pieces`). The trainer's StorageWriter uses
`item_shell` for tensors in memory, and `blob_item` for values.
"""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from converters.common.crc import crc32
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError
from converters.containers.safe_pickle import PLAIN_STUBS, safe_load
from converters.containers.stored_zip import (
    ReadAt,
    ZipEntry,
    ZipRecord,
    read_zip,
    small_entry,
    zip_pieces,
    zip_shell,
)
from converters.containers.tensor_pickle import TensorRef, dump_tensor, load_tensors

_WINDOW_BYTES = 2048  # torch's head and tail of a tensor take 1.6 kB: one read at each end is enough
_MAX_RECORD_BYTES = 64 << 20  # of small entries; storages may have any size
_VERSION = ("archive/version", b"3\n")


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """The position of an item's raw data; offsets from the item's first byte."""

    total_bytes: int
    data_offset: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class ItemData:
    """An item's content. Element `i` is at `data_offset + sum(i[d] * strides[d]) * itemsize` from the item's start."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data_offset: int
    crc32: int | None  # of the whole storage record; None if the writer left it out
    record: tuple[int, int]  # (offset, length) of that record, from the item's start


@lru_cache(maxsize=4096)
def item_layout(dtype: str, shape: tuple[int, ...], *, streamed: bool = False) -> ItemLayout:
    """The sizes of the item of a contiguous tensor, which `item_pieces` makes."""
    (_, head), (tail_offset, tail) = item_pieces(dtype, shape, lambda: 0, streamed=streamed)
    return ItemLayout(tail_offset + len(tail), len(head), tail_offset - len(head))


def item_pieces(
    dtype: str, shape: tuple[int, ...], data_crc32: Callable[[], int], *, streamed: bool = False
) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of head and tail: head + raw row-major data + tail is what torch.load opens.

    If `streamed`, `data_crc32` is called after the head was yielded (see `zip_pieces`).
    """
    before = [("archive/data.pkl", dump_tensor(dtype, shape)), ("archive/byteorder", b"little"), _VERSION]
    data = ZipEntry("archive/data/0", prod(shape) * itemsize(dtype))
    entries = [*(small_entry(name, content) for name, content in before), data]
    return zip_pieces(entries, lambda number: data_crc32(), streamed=streamed)


def item_shell(dtype: str, shape: tuple[int, ...], data_crc32: int) -> tuple[bytes, bytes]:
    """Head and tail of an item (see `item_pieces`)."""
    (_, head), (_, tail) = item_pieces(dtype, shape, lambda: data_crc32)
    return head, tail


def read_item(read_at: ReadAt, length: int, *, what: str) -> ItemData:
    """Open the item of `length` bytes that `read_at` reads. Raises CheckpointError if it is not one plain tensor."""
    records, ref, prefix = read_archive(windowed(read_at, length), length, what=what)
    if not isinstance(ref, TensorRef):
        raise CheckpointError(f"{what}: holds a {type(ref).__name__}, not a tensor")
    record = storage_record(records, prefix, ref, what=what)
    return ItemData(
        ref.dtype,
        ref.shape,
        ref.strides,
        record.data_offset + ref.storage_offset * itemsize(ref.dtype),
        record.crc32 or None,
        (record.data_offset, record.size),
    )


def read_archive(read_at: ReadAt, size: int, *, what: str) -> tuple[dict[str, ZipRecord], Any, str]:
    """(entries, unpickled value, name of the archive's root) of a torch.save zip."""
    records = read_zip(read_at, size, what=what)
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{what}: a zip, but not one that torch.save wrote (no data.pkl in it)")
    prefix = pickles[0].removesuffix("data.pkl")
    order = records.get(prefix + "byteorder")
    if order is not None and read_at(order.data_offset, order.size) != b"little":
        raise CheckpointError(f"{what}: its byte order is not little-endian")
    data = checked_record(read_at, records[pickles[0]], what=what)
    return records, load_tensors(data, what=f"{what}, data.pkl"), prefix


def checked_record(read_at: ReadAt, record: ZipRecord, *, what: str) -> bytes:
    """The bytes of a small entry, after comparing them with their CRC32."""
    if record.size > _MAX_RECORD_BYTES:
        raise CheckpointError(f"{what}: {record.name} takes {record.size:,} bytes, more than is plausible")
    data = read_at(record.data_offset, record.size)
    if record.crc32 and crc32(data) != record.crc32:
        raise CheckpointError(f"{what}: {record.name} is damaged (its CRC32 does not match)")
    return data


def storage_record(records: dict[str, ZipRecord], prefix: str, ref: TensorRef, *, what: str) -> ZipRecord:
    """The entry that holds a tensor's storage, whose size must be that of the pickle."""
    record = records.get(f"{prefix}data/{ref.storage.key}")
    if record is None:
        raise CheckpointError(f"{what}: the storage {ref.storage.key!r} is missing")
    expected = ref.storage.num_elements * (itemsize(ref.storage.dtype) if ref.storage.dtype else 1)
    if record.size != expected:
        raise CheckpointError(f"{what}: {record.name} holds {record.size:,} bytes instead of {expected:,}")
    return record


def windowed(read_at: ReadAt, length: int) -> ReadAt:
    """`read_at` with the first and last bytes kept, so that parsing a small zip costs two reads."""
    head = read_at(0, min(length, _WINDOW_BYTES))
    tail_offset = max(0, length - _WINDOW_BYTES)
    tail = read_at(tail_offset, length - tail_offset)

    def read(offset: int, num: int) -> bytes:
        if offset + num <= len(head):
            return head[offset : offset + num]
        if offset >= tail_offset:
            return tail[offset - tail_offset :][:num]
        return read_at(offset, num)

    return read


def blob_item(value: Any) -> bytes:
    """The item of a plain value, equivalent to torch.save(value). Raises CheckpointError for anything else."""
    check_plain(value, what="a checkpoint entry")
    before = [("archive/data.pkl", pickle.dumps(value, protocol=2)), ("archive/byteorder", b"little")]
    name, version = _VERSION
    head, tail = zip_shell(before, name, len(version), crc32(version))
    return head + version + tail


def read_blob_item(data: bytes, *, what: str = "a checkpoint entry") -> Any:
    """The plain value of an item; anything but plain values (see `check_plain`) is refused."""

    def read_at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    records = read_zip(read_at, len(data), what=what)
    pickles = [record for name, record in records.items() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{what}: a zip, but not one that torch.save wrote (no data.pkl in it)")
    value = safe_load(checked_record(read_at, pickles[0], what=what), PLAIN_STUBS, what=what)
    check_plain(value, what=what)
    return value


def check_plain(value: Any, *, what: str) -> None:
    """Raise CheckpointError unless `value` is made of plain values only, without a cycle."""
    pending, budget = [value], 1_000_000
    while pending:
        item = pending.pop()
        budget -= 1
        if budget < 0:
            raise CheckpointError(f"{what}: endless, or more than a million values")
        if type(item) in (list, tuple, set):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif item is not None and type(item) not in (int, float, bool, str, bytes):
            kind = "tensor" if isinstance(item, TensorRef) else type(item).__name__
            raise CheckpointError(
                f"{what}: holds a {kind}, and only plain values are allowed",
                hint="int, float, bool, None, str, bytes, list, tuple, set and dict are plain",
            )
