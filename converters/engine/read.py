"""Read boxes of tensors through a catalog: parts of files, memory bounded by the box and an 8 MiB buffer."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from converters.common.box import Box, TensorInfo
from converters.common.crc import crc32
from converters.common.dtypes import itemsize, numpy_dtype
from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.names import DCP_METADATA
from converters.containers.dcp_item import blob_item, checked_record, read_blob_item, read_item
from converters.containers.stored_zip import read_zip
from converters.store.base import reading_part
from converters.views.catalog import UNLOCATED, Catalog, Chunk
from converters.views.cover import BoxIndex

BLOCK_BYTES = 8 << 20
_LONG_RUN_BYTES = 32 << 10  # from this length on, one read per run is faster than reading the gaps, too
_LONG_GAP_BYTES = 8 << 10  # a gap from this length on takes longer than another read
_MAX_AMPLIFICATION = 16  # gaps between short runs are read up to this factor
_RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}
_ReadInto = Callable[[int, memoryview], None]  # fills a buffer with a file's bytes from an offset on
_OnRead = Callable[[str, int, memoryview], None]  # gets file, offset and bytes


class CatalogReader:
    """The tensors of a catalog as a TensorSource. Use as a context manager; threads may read at the same time."""

    def __init__(self, catalog: Catalog):
        self.catalog = catalog
        self.tensors: Mapping[str, TensorInfo] = {
            fqn: TensorInfo(entry.dtype, entry.shape) for fqn, entry in catalog.tensors.items()
        }
        self._store = catalog.store
        self._identities: dict[str, tuple[str | int, ...]] = {}
        for name in catalog.tensor_files:  # so that a change before the first use is noticed, too
            with suppress(CheckpointError):
                self._identities[name] = self._store.identity(name)
        self._used: set[str] = set()
        self._place = cache(lambda name: catalog.location / name)
        self.on_read: _OnRead | None = None  # called for each read of a tensor
        self._indexes: dict[str, BoxIndex] = {}
        self._located: dict[tuple[str, tuple[int, ...]], Chunk] = {}  # by FQN and offsets of the chunk

    def __enter__(self) -> "CatalogReader":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._store.close()
        if kind is None:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file was replaced or changed since this reader was made."""
        for name, identity in self._identities.items():
            try:
                is_same = self._store.identity(name) == identity
            except CheckpointError:
                is_same = False
            if not is_same:
                raise self._changed(name)

    def _changed(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._place(name)}: changed while it was being read", hint="is another process writing it?"
        )

    def read(self, fqn: str, box: Box) -> np.ndarray:
        """The values of a box, row-major. Raises CheckpointError unless the chunks cover each element exactly once."""
        entry = self.catalog.tensors[fqn]
        width = itemsize(entry.dtype)
        out = np.empty(box.sizes, dtype=_RAW[width])
        covered = 0
        if out.size:
            index = self._indexes.get(fqn)
            if index is None:
                index = self._indexes[fqn] = BoxIndex([chunk.box for chunk in entry.chunks])
            for number in index.touching(box):
                chunk = entry.chunks[number]
                common = chunk.box.intersect(box)
                if common is None:
                    continue
                chunk = self.located(fqn, chunk)
                inner = zip(common.offsets, chunk.box.offsets, chunk.strides, strict=True)
                start = chunk.byte_offset + sum((a - b) * stride for a, b, stride in inner) * width
                part = out[common.slices_within(box)] if box.sizes else out
                _read_strided(self._reading(chunk.file, fqn, self.on_read), start, chunk.strides, part)
                covered += common.num_elements
        if covered != out.size:
            raise CheckpointError(
                f"{fqn}: chunks cover {covered:,} of {out.size:,} elements, {list(box.sizes)} at {list(box.offsets)}"
            )
        values: np.ndarray[Any, Any] = out.view(numpy_dtype(entry.dtype))
        return values

    def _reading(self, file: str, fqn: str, on_read: _OnRead | None = None) -> _ReadInto:
        """The function that reads a file for an entry, which errors name."""
        if file not in self._used:  # it must be what it was when this reader was made
            identity = self._store.identity(file)
            if self._identities.setdefault(file, identity) != identity:
                raise self._changed(file)
            self._used.add(file)
        read = self._store.read_into

        def read_into(start: int, view: memoryview) -> None:
            try:
                read(file, start, view)
            except CheckpointError as error:
                message = f"{error.message} ({fqn})"
                raise CheckpointError(message, hint=error.hint, tries=error.tries) from error.__cause__
            if on_read is not None:
                on_read(file, start, view)

        return read_into

    def located(self, fqn: str, chunk: Chunk) -> Chunk:
        """The chunk with its byte offset, strides and CRC; opens its DCP item the first time."""
        if chunk.byte_offset != UNLOCATED:
            return chunk
        known = self._located.get((fqn, chunk.box.offsets))
        if known is not None:
            return known
        assert chunk.item is not None  # as of every chunk that is not located
        start, length = chunk.item
        what = f"{self._place(chunk.file)}: {fqn} at {list(chunk.box.offsets)}"
        item = read_item(reading_part(self._store, chunk.file, start, length), length, what=what)
        dtype = self.catalog.tensors[fqn].dtype
        if (item.dtype, item.shape) != (dtype, chunk.box.sizes):
            raise CheckpointError(
                f"{what}: holds {item.dtype} {list(item.shape)}, {DCP_METADATA} says {dtype} {list(chunk.box.sizes)}"
            )
        found = replace(
            chunk,
            byte_offset=start + item.data_offset,
            strides=item.strides,
            crc32=item.crc32,
            record=(start + item.record[0], item.record[1]),
        )
        self._located[fqn, chunk.box.offsets] = found
        return found

    @property
    def opened(self) -> list[Chunk]:
        """The chunks whose DCP items have been opened, with their byte offsets."""
        return [*self._located.values()]

    def read_blob(self, fqn: str) -> bytes:
        """The item of a value: the bytes that DCP stores, undecoded."""
        value = self.catalog.values[fqn]
        if value.item is None:
            return blob_item(value.plain)
        data = bytearray(value.item.length)
        self._reading(value.item.file, fqn)(value.item.byte_offset, memoryview(data))
        return bytes(data)

    def read_value(self, fqn: str) -> Any:
        """A value. Raises CheckpointError if it is not plain (see dcp_item.check_plain)."""
        value = self.catalog.values[fqn]
        return value.plain if value.item is None else read_blob_item(self.read_blob(fqn), what=fqn)

    def blob_problems(self, fqn: str) -> list[str]:
        """Compare the CRC32 of each record of a non-tensor item with its bytes; its pickle is not read."""
        data = self.read_blob(fqn)

        def read_at(offset: int, length: int) -> bytes:
            return data[offset : offset + length]

        try:
            for record in read_zip(read_at, len(data), what=fqn).values():
                checked_record(read_at, record, what=fqn)
        except CheckpointError as error:
            return [error.message]
        return []

    def record_problems(self, fqn: str) -> list[str]:
        """Compare the CRC32 that each chunk's record carries with its bytes: torch stores it and never checks it.

        Chunks without a CRC32 are skipped (see `Chunk.crc32`).
        """
        problems = []
        for chunk in self.catalog.all_chunks(fqn):
            chunk = self.located(fqn, chunk)
            if chunk.crc32 is None or chunk.record is None:
                continue
            if self._crc32(chunk.file, *chunk.record, what=fqn) != chunk.crc32:
                problems.append(f"{fqn} at {list(chunk.box.offsets)} in {chunk.file}: its bytes have changed (CRC32)")
        return problems

    def _crc32(self, file: str, offset: int, length: int, *, what: str) -> int:
        """The CRC32 of a part of a file, read block by block."""
        read_into = self._reading(file, what)
        crc, buffer = 0, memoryview(bytearray(min(length, BLOCK_BYTES)))
        for position in range(0, length, BLOCK_BYTES):
            part = buffer[: min(BLOCK_BYTES, length - position)]
            read_into(offset + position, part)
            crc = crc32(part, crc)
        return crc

    def unread_problems(self, fqn: str) -> list[str]:
        """Compare every record of DCP items whose tensors are not supported with the CRC32 that it carries."""
        problems = []
        for chunk in self.catalog.tensors[fqn].chunks:
            assert chunk.item is not None
            start, length = chunk.item
            records = read_zip(reading_part(self._store, chunk.file, start, length), length, what=fqn)
            for record in records.values():
                if record.crc32 and record.crc32 != self._crc32(
                    chunk.file, start + record.data_offset, record.size, what=fqn
                ):
                    problems.append(
                        f"{fqn} at {list(chunk.box.offsets)} in {chunk.file}: {record.name} has changed (CRC32)"
                    )
        return problems

    def smaller_than_listed(self) -> dict[str, str]:
        """Tensors whose DCP items are too small for their values: name → what the first item of each holds instead."""
        found = {}
        for fqn, entry in self.catalog.tensors.items():
            width = itemsize(entry.dtype)
            small = [c for c in entry.chunks if c.item is not None and c.item[1] < c.box.num_elements * width]
            if small:
                try:
                    self.located(fqn, small[0])
                except CheckpointError:  # damage, which reading reports
                    continue
                except UnsupportedError as error:
                    found[fqn] = error.message.partition(", data.pkl: ")[2]
        return found


def _read_strided(read_into: _ReadInto, start: int, strides: tuple[int, ...], out: np.ndarray) -> None:
    """Fill `out` (any numpy strides) with the elements at `start + sum(i[d] * strides[d]) * itemsize`."""
    # Read the file forwards: dims by decreasing stride, dims of size 1 first, where their stride does not matter.
    order = sorted(range(out.ndim), key=lambda d: (out.shape[d] > 1, -strides[d]))
    out = out.transpose(order)
    steps = [strides[d] for d in order]
    outer, run = out.ndim, 1
    while outer and (out.shape[outer - 1] == 1 or steps[outer - 1] == run):
        run *= out.shape[outer - 1]
        outer -= 1
    if not outer:
        _read_run(read_into, start, out)
        return
    width, rows, pitch = out.itemsize, out.shape[outer - 1], steps[outer - 1]
    for index in np.ndindex(out.shape[: outer - 1]):
        row_start = start + sum(i * step for i, step in zip(index, steps, strict=False)) * width
        part = out[index]
        if (
            run * width >= _LONG_RUN_BYTES
            or (pitch - run) * width >= _LONG_GAP_BYTES
            or pitch > _MAX_AMPLIFICATION * run
        ):
            if part.flags.c_contiguous:
                flat, length = part.reshape(-1).view(np.uint8).data, run * width
                for row in range(rows):
                    read_into(row_start + row * pitch * width, flat[row * length : (row + 1) * length])
                continue
            for row in range(rows):
                _read_run(read_into, row_start + row * pitch * width, part[row : row + 1])
            continue
        at_once = max(1, BLOCK_BYTES // (pitch * width))
        for row in range(0, rows, at_once):
            count = min(at_once, rows - row)
            buffer = np.empty((count - 1) * pitch + run, dtype=out.dtype)
            _read_run(read_into, row_start + row * pitch * width, buffer)
            picked = np.lib.stride_tricks.as_strided(buffer, (count, run), (pitch * width, width))
            part[row : row + count] = picked.reshape(part[row : row + count].shape)


def _read_run(read_into: _ReadInto, start: int, out: np.ndarray) -> None:
    """Fill `out` from contiguous bytes of the file, through a buffer where `out` is not contiguous."""
    if out.flags.c_contiguous:
        read_into(start, out.reshape(-1).view(np.uint8).data)
        return
    if out.nbytes > BLOCK_BYTES and out.shape[0] > 1:
        row_bytes = prod(out.shape[1:]) * out.itemsize
        at_once = max(1, BLOCK_BYTES // row_bytes)
        for row in range(0, out.shape[0], at_once):
            _read_run(read_into, start + row * row_bytes, out[row : row + at_once])
        return
    if out.nbytes > BLOCK_BYTES:
        _read_run(read_into, start, out[0])
        return
    buffer = np.empty(out.shape, dtype=out.dtype)
    _read_run(read_into, start, buffer)
    out[...] = buffer
