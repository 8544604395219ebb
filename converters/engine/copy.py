"""Fill a target from a source: whole-row blocks of about 1 MiB, each read, cast, hashed and written once."""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from converters.common.box import Box, TensorSource
from converters.common.crc import crc32, join_crc32
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.common.threads import deferred_signals, in_parallel
from converters.containers.target import Slot, Target, write_all
from converters.engine.journal import Journal
from converters.store.digest import TensorDigest
from converters.store.open_files import OpenFiles
from converters.views.casts import cast, check_castable, count_non_finite
from converters.views.cover import BoxIndex
from converters.views.encoder import Encoder
from converters.views.expressions import RowNumbers
from converters.views.view import View

DEFAULT_WORKERS = 2
BLOCK_BYTES = 1 << 20  # read, hashed and written at a time: fits into a core's cache
UNIT_BYTES = 8 << 20  # the work of a thread, and of a line of the journal
MOST_BYTES = 12 << 20  # that are read at a time where a view asks for rows together


@dataclass(slots=True)
class CopyResult:
    """What was written: CRC32 per slot (in the order of `Target.slots`), digest and non-finite values per tensor."""

    crc32: list[int]
    digests: dict[str, str] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)  # only of tensors that have any
    relative_error: dict[str, float] = field(default_factory=dict)  # largest error of a cast, where it is not exact
    resumed_bytes: int = 0  # written by an earlier attempt, and read back
    num_moved: int = 0  # scales that differ from the known ones (see Encoder)


@dataclass(frozen=True, slots=True)
class _WrittenRun:
    """A contiguous run of bytes in a slot that was written."""

    slot: int
    offset: int
    length: int
    crc32: int


@dataclass(slots=True)
class _Unit:
    """Work for one thread: consecutive boxes of one tensor that together are whole rows, and their results."""

    number: int
    fqn: str
    boxes: list[Box]
    pieces: list[_WrittenRun] = field(default_factory=list)  # one for each slot that it touches
    digest: int | None = None  # sums of the unit's rows (TensorDigest.partial)
    source_digest: int | None = None  # of the values before a cast
    scales_digest: int | None = None  # of the tensor of scales
    moved: int = 0  # of the scales
    non_finite: int = 0
    overflows: int = 0
    relative_error: float = 0.0
    num_bytes: int = 0
    resumed: bool = False

    def record(self) -> dict[str, Any]:
        """The unit's record in the journal."""
        pieces = [[piece.slot, piece.offset, piece.length, piece.crc32] for piece in self.pieces]
        return {"pieces": pieces} | {name: getattr(self, name) for name in _RECORDED}

    def recall(self, record: Mapping[str, Any]) -> None:
        """Restore the results from a record of the journal."""
        self.pieces = [_WrittenRun(*piece) for piece in record["pieces"]]
        for name in _RECORDED:
            setattr(self, name, record[name])
        self.resumed = True


def copy_tensors(
    source: TensorSource,
    target: Target,
    folder: Path,
    *,
    casts: Mapping[str, str] | None = None,
    encoders: Mapping[str, Encoder] | None = None,
    workers: int = DEFAULT_WORKERS,
    digests: bool = True,
    native_rows: RowNumbers | None = None,
    check_source: Callable[[Mapping[str, TensorDigest]], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    journal: Journal | None = None,
) -> CopyResult:
    """Copy every slot of `target` from `source` into files of `folder`; `target.finish(folder, crc32s)` is next.

    `casts` (FQN → dtype) are the only casts; a finite value that becomes infinite is an error that lists all tensors
    with such values. `encoders` (FQN → encoder) make two tensors of the target, codes and scales, of one of the source;
    the digest of the codes is that of the values that they stand for. `check_source` gets the digests of what was read,
    before any cast, and raises if they are wrong. Memory: a few blocks per worker. `on_bytes` is called for each
    unit. `journal` records every unit that is written; units that it has recorded before are skipped if the bytes in
    `folder` have the recorded CRC32s.
    """
    casts, encoders = casts or {}, encoders or {}
    _check_match(source, target, casts, encoders)
    by_tensor: dict[str, list[int]] = {fqn: [] for fqn in target.tensors}
    for number, slot in enumerate(target.slots):
        by_tensor[slot.fqn].append(number)
    indexes = {fqn: BoxIndex([target.slots[n].box for n in numbers]) for fqn, numbers in by_tensor.items()}
    changed = {fqn for fqn, dtype in casts.items() if dtype != source.tensors[fqn].dtype}
    files = OpenFiles(folder, flags=os.O_RDWR)  # no O_CREAT: see _create_files
    _create_files(folder, target, resuming=journal is not None)

    def new_digest(fqn: str) -> TensorDigest:
        if encoder := encoders.get(fqn):  # of the values, which may have another shape than their codes
            return TensorDigest(encoder.digest_dtype, source.tensors[fqn].shape)
        return TensorDigest(target.tensors[fqn].dtype, target.tensors[fqn].shape)

    def run(unit: _Unit) -> _Unit:
        fqn = unit.fqn
        if journal and (record := journal.recorded(unit.number)):
            unit.recall(record)
            if _still_there(files, target, unit.pieces):
                return unit
            unit = _Unit(unit.number, fqn, unit.boxes)
        encoder = encoders.get(fqn)
        digest = new_digest(fqn) if digests or (check_source and not encoder) else None
        scales_digest = new_digest(encoder.scales) if encoder and digests else None
        source_digest = None
        if check_source and (encoder or fqn in changed):
            source_digest = TensorDigest(source.tensors[fqn].dtype, source.tensors[fqn].shape)

        written: dict[int, _WrittenRun] = {}

        def add(digest: TensorDigest, box: Box, array: np.ndarray) -> None:
            rows = digest.row_numbers(box)
            digest.update(box, array, rows=native_rows(fqn, rows) if native_rows else rows)

        def write(fqn: str, box: Box, array: np.ndarray) -> None:
            for position in indexes[fqn].touching(box):
                number = by_tensor[fqn][position]
                common = target.slots[number].box.intersect(box)
                if common is not None:
                    written[number] = _write(
                        files, target.slots[number], number, box, common, array, after=written.get(number)
                    )
            unit.num_bytes += array.nbytes

        for box, array in _blocks(source, fqn, unit.boxes, whole=encoder is not None):
            if source_digest is not None:
                add(source_digest, box, array)
            if fqn in changed:
                done = cast(array, casts[fqn])
                array = done.values
                unit.overflows += done.overflows
                unit.relative_error = max(unit.relative_error, done.relative_error)
            array = np.ascontiguousarray(array)
            unit.non_finite += count_non_finite(array, array.dtype.name)
            if encoder:
                encoded = encoder.encode(box, array)
                unit.moved += encoded.num_moved
                write(encoder.scales, encoded.place, encoded.scales)
                if scales_digest is not None:
                    scales_digest.update(encoded.place, encoded.scales)
                write(fqn, encoded.codes_place, encoded.codes)
                array = encoder.values_of(encoded, box) if digest is not None else array
            else:
                write(fqn, box, array)
            if digest is not None:
                add(digest, box, array)
        unit.pieces = list(written.values())
        for piece in unit.pieces:
            slot = target.slots[piece.slot]
            with files.use(slot.file) as descriptor:
                begin_writeback(descriptor, slot.byte_offset + piece.offset, piece.length)
        unit.digest = digest.partial if digest else None
        unit.source_digest = source_digest.partial if source_digest else None
        unit.scales_digest = scales_digest.partial if scales_digest else None
        return unit

    sums = {fqn: new_digest(fqn) for fqn in target.tensors}
    source_sums = {
        fqn: TensorDigest(source.tensors[fqn].dtype, source.tensors[fqn].shape) for fqn in (*changed, *encoders)
    }
    result = CopyResult([0] * len(target.slots))
    filled = [0] * len(target.slots)
    overflows: dict[str, int] = {}
    # Closed in this order in any case: first the threads stop writing, then the files are closed.
    units = in_parallel(run, _units(source, target, encoders), workers)
    with deferred_signals() as deliver_signals, closing(files), closing(units):
        for unit in units:
            deliver_signals()
            for piece in unit.pieces:  # units are in order, and so are the pieces of each slot
                assert piece.offset == filled[piece.slot], f"{unit.fqn}: a gap in a slot"
                result.crc32[piece.slot] = join_crc32(result.crc32[piece.slot], piece.crc32, piece.length)
                filled[piece.slot] += piece.length
            if unit.digest is not None:
                sums[unit.fqn].add_partial(unit.digest)
            if unit.source_digest is not None:
                source_sums[unit.fqn].add_partial(unit.source_digest)
            if unit.scales_digest is not None:
                sums[encoders[unit.fqn].scales].add_partial(unit.scales_digest)
            result.num_moved += unit.moved
            for counts, count in ((result.non_finite, unit.non_finite), (overflows, unit.overflows)):
                if count:
                    counts[unit.fqn] = counts.get(unit.fqn, 0) + count
            if unit.relative_error:
                known = result.relative_error.get(unit.fqn, 0.0)
                result.relative_error[unit.fqn] = max(known, unit.relative_error)
            if unit.resumed:
                result.resumed_bytes += unit.num_bytes
            elif journal:
                journal.append(unit.number, unit.record())
            if on_bytes:
                on_bytes(unit.num_bytes)
    if check_source:  # first: damaged values may overflow, too
        check_source(sums | source_sums)
    if overflows:
        lost = [
            f"{fqn}: {count:,} {'value does' if count == 1 else 'values do'} not fit {casts[fqn]}"
            for fqn, count in overflows.items()
        ]
        raise CheckpointError(f"the cast overflows:{list_offenders(lost)}", hint="choose a wider --dtype")
    for slot, num_bytes in zip(target.slots, filled, strict=True):
        assert num_bytes == slot.num_bytes, f"{slot.fqn}: a slot was not filled"
    if digests:
        result.digests = {fqn: digest.hexdigest() for fqn, digest in sums.items()}
    return result


def whole_row_units(shape: tuple[int, ...], width: int, max_bytes: int) -> Iterator[list[Box]]:
    """Split a tensor into units of whole rows (last dim) of at most `max_bytes`; a longer row has several boxes."""
    if 0 in shape:
        return
    if not shape:
        yield [Box((), ())]
        return
    dim = next(d for d in range(len(shape)) if d == len(shape) - 1 or prod(shape[d + 1 :]) * width <= max_bytes)
    step = max(1, max_bytes // (prod(shape[dim + 1 :]) * width))
    inner = shape[dim + 1 :]
    for lead in np.ndindex(shape[:dim]):
        boxes = [
            Box((*lead, start, *(0,) * len(inner)), (*(1,) * dim, min(step, shape[dim] - start), *inner))
            for start in range(0, shape[dim], step)
        ]
        if dim == len(shape) - 1 and dim > 0:
            yield boxes
        else:
            yield from ([box] for box in boxes)


_RECORDED = (
    "digest",
    "source_digest",
    "scales_digest",
    "moved",
    "non_finite",
    "overflows",
    "relative_error",
    "num_bytes",
)


def _units(source: TensorSource, target: Target, encoders: Mapping[str, Encoder]) -> Iterator[_Unit]:
    number, scales = 0, {encoder.scales for encoder in encoders.values()}
    for fqn, info in target.tensors.items():
        if fqn in scales:
            continue
        encoder = encoders.get(fqn)
        info = source.tensors[fqn] if encoder else info
        width = itemsize(info.dtype)
        unit_boxes: list[Box] = []
        row_bytes = (info.shape[-1] if len(info.shape) > 1 else 1) * width
        block_bytes = _block_bytes(source, fqn, row_bytes)
        if encoder:
            block_bytes = max(_whole_blocks(encoder.rows * row_bytes), block_bytes)
            block_bytes -= block_bytes % (encoder.rows * row_bytes)
        for boxes in whole_row_units(info.shape, width, block_bytes):
            unit_boxes += boxes
            if sum(box.num_elements for box in unit_boxes) * width > UNIT_BYTES - BLOCK_BYTES:
                yield _Unit(number, fqn, unit_boxes)
                number, unit_boxes = number + 1, []
        if unit_boxes:
            yield _Unit(number, fqn, unit_boxes)
            number += 1


def _block_bytes(source: TensorSource, fqn: str, row_bytes: int) -> int:
    """Maximal bytes that are read at a time: rows that a view permutes among each other (those of a head), together."""
    rows = _rows_together(source, fqn)
    if rows == 1 or not 0 < row_bytes <= MOST_BYTES:
        return BLOCK_BYTES
    most = MOST_BYTES // row_bytes
    if rows > most > 3 * 32:  # an odd multiple of 32, see TRANSPOSED_ROWS
        most = (most - 32) // 64 * 64 + 32
    return _whole_blocks(min(rows, most) * row_bytes)


def _blocks(
    source: TensorSource, fqn: str, boxes: Sequence[Box], *, whole: bool
) -> Iterator[tuple[Box, np.ndarray[Any, Any]]]:
    """Boxes with their values. Those that are read together are cut into blocks of BLOCK_BYTES unless `whole`."""
    for read in boxes:
        array = source.read(fqn, read)
        if whole or array.nbytes <= BLOCK_BYTES:
            yield read, array
            continue
        for blocks in whole_row_units(read.sizes, array.itemsize, BLOCK_BYTES):
            for block in blocks:
                offsets = tuple(a + b for a, b in zip(read.offsets, block.offsets, strict=True))
                yield Box(offsets, block.sizes), array[block.slices_within(Box.whole(read.sizes))]


def _whole_blocks(num_bytes: int) -> int:
    """A multiple of `num_bytes`: about as much as is read at a time."""
    return max(num_bytes, BLOCK_BYTES - BLOCK_BYTES % max(1, num_bytes))


def _rows_together(source: TensorSource, fqn: str) -> int:
    """The rows that a view, or a view that it is of, permutes among each other."""
    if not isinstance(source, View) or fqn not in source.expressions:
        return 1
    expression, inner = source.expressions[fqn], source.source
    if not isinstance(inner, View):
        return expression.rows_together
    return max([expression.rows_together, *(_rows_together(inner, name) for name in expression.sources)])


def _write(
    files: OpenFiles, slot: Slot, number: int, box: Box, common: Box, array: np.ndarray, *, after: _WrittenRun | None
) -> _WrittenRun:
    """Write the `common` part of a box to a slot; returns its piece, joined with the preceding one, `after`."""
    part = np.ascontiguousarray(array[common.slices_within(box)] if box.sizes else array)
    data = part.reshape(-1).view(np.uint8).data
    element = 0  # of the slot, in which whole rows (or parts of one row) are contiguous
    for offset, base, size in zip(common.offsets, slot.box.offsets, slot.box.sizes, strict=True):
        element = element * size + offset - base
    offset = element * itemsize(slot.dtype)
    with files.use(slot.file) as descriptor:
        write_all(descriptor, data, slot.byte_offset + offset, what=slot.file)
    if after is None:
        return _WrittenRun(number, offset, len(data), crc32(data))
    assert offset == after.offset + after.length, f"{slot.fqn}: a gap in a slot"
    return _WrittenRun(number, after.offset, after.length + len(data), crc32(data, after.crc32))


def _still_there(files: OpenFiles, target: Target, pieces: Sequence[_WrittenRun]) -> bool:
    """Whether the pieces still have the bytes that were written."""
    for piece in pieces:
        slot, found = target.slots[piece.slot], 0
        start, end = slot.byte_offset + piece.offset, slot.byte_offset + piece.offset + piece.length
        with files.use(slot.file) as descriptor:
            for position in range(start, end, BLOCK_BYTES):
                found = crc32(os.pread(descriptor, min(BLOCK_BYTES, end - position), position), found)
        if found != piece.crc32:
            return False
    return True


def _create_files(folder: Path, target: Target, *, resuming: bool) -> None:
    """Create every file before a thread writes.

    An interrupt within `Thread.start` leaves a thread that its pool does not know and cannot wait for. Such a thread
    must not create a file anew in a folder that is being removed.
    """
    for file in {slot.file for slot in target.slots}:
        (folder / file).touch(exist_ok=resuming)


def _check_match(
    source: TensorSource, target: Target, casts: Mapping[str, str], encoders: Mapping[str, Encoder]
) -> None:
    made = {encoder.scales for encoder in encoders.values()}
    lacking = [fqn for fqn in target.tensors if fqn not in source.tensors and fqn not in made]
    problems = [f"{fqn}: the source does not have it" for fqn in lacking]
    changes = {}
    for fqn, info in target.tensors.items():
        if fqn not in source.tensors:
            continue
        held = source.tensors[fqn]
        if fqn in encoders:
            continue
        if held.shape != info.shape:
            problems.append(f"{fqn}: {list(held.shape)} in the source, {list(info.shape)} expected")
        if casts.get(fqn, held.dtype) != info.dtype:
            problems.append(f"{fqn}: {held.dtype} in the source, {info.dtype} expected")
        changes[fqn] = (held.dtype, info.dtype)
    if problems:
        raise CheckpointError(f"source and target do not match:{list_offenders(problems)}")
    check_castable(changes)


_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start without waiting


def begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """Start writing a range to the disk, so that the fsync at the end is short. No effect where it is unsupported."""
    if call := _sync_file_range():
        call(descriptor, offset, length, _WRITE)


@cache
def _sync_file_range() -> Any:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
