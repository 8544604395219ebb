"""Fill a target from a source: whole-row blocks of about 1 MiB, each read, cast, hashed and written once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import numpy as np

from converters.common.box import Box, TensorSource
from converters.common.crc import join_crc32
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.common.threads import deferred_signals, in_parallel
from converters.containers.target import Target
from converters.engine.writers import OffsetWriter, OrderWriter, Writer, Writing, WrittenRun
from converters.store.digest import TensorDigest, has_whole_rows
from converters.store.journal import Journal
from converters.store.manifest import FileSum
from converters.store.output import Output
from converters.views.casts import cast, check_castable, count_non_finite
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
    files: dict[str, FileSum] = field(default_factory=dict)  # size and CRC32 of every file with tensors
    read_twice: Sequence[str] = ()  # tensors, because the output can only be appended to


@dataclass(slots=True)
class _Unit:
    """Work for one thread: consecutive boxes of one tensor that together are whole rows, and their results.

    Of a slot that cuts rows, or is written in order, the boxes are parts of that slot.
    """

    number: int
    fqn: str
    boxes: list[Box]
    writing: Writing
    is_digested: bool = True  # it adds its rows to the digests
    is_counted: bool = True  # it adds its values to the counts
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
        """Record of the unit in the journal."""
        pieces = [[run.slot, run.offset, run.length, run.crc32] for run in self.writing.runs.values()]
        return {"pieces": pieces} | {name: getattr(self, name) for name in _RECORDED}

    def recall(self, record: Mapping[str, Any]) -> None:
        """Restore the results from a record of the journal."""
        self.writing.runs = {piece[0]: WrittenRun(*piece) for piece in record["pieces"]}
        for name in _RECORDED:
            setattr(self, name, record[name])
        self.resumed = True


def copy_tensors(
    source: TensorSource,
    target: Target,
    output: Output,
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
    """Write the files of `target` that have tensors: copy every slot from `source`, and write what is around them.

    `casts` (FQN → dtype) are the only casts; a finite value that becomes infinite is an error that lists all tensors
    with such values. `encoders` (FQN → encoder) make two tensors of the target, codes and scales, of one of the source;
    the digest of the codes is that of the values that they stand for. `check_source` gets the digests of what was read,
    before any cast, and raises if they are wrong. Memory: a few blocks per worker. `on_bytes` is called for each
    unit. `journal` records every unit that is written; units that it has recorded before are skipped if the output
    still has what they wrote.
    """
    casts, encoders = casts or {}, encoders or {}
    _check_match(source, target, casts, encoders)
    changed = {fqn for fqn, dtype in casts.items() if dtype != source.tensors[fqn].dtype}
    result = CopyResult([0] * len(target.slots))
    writer: Writer
    if output.offset_files is not None:
        units = _units(source, target, encoders)
        writer = OffsetWriter(target, output.offset_files, resuming=journal is not None)
    else:
        twice = _read_twice(target, encoders, digested=digests or check_source is not None)
        units, result.read_twice = _units_in_order(source, target, encoders, twice), twice
        writer = OrderWriter(target, output, result.crc32, journal=journal)

    def new_digest(fqn: str) -> TensorDigest:
        if encoder := encoders.get(fqn):  # of the values, which may have another shape than their codes
            return TensorDigest(encoder.digest_dtype, source.tensors[fqn].shape)
        return TensorDigest(target.tensors[fqn].dtype, target.tensors[fqn].shape)

    def run(unit: _Unit) -> _Unit:
        fqn = unit.fqn
        if journal and (record := journal.recorded(unit.number)):
            unit.recall(record)
            if writer.still_has(unit.writing):
                return unit
            unit = _Unit(
                unit.number, fqn, unit.boxes, Writing(unit.writing.only_slot), unit.is_digested, unit.is_counted
            )
        encoder = encoders.get(fqn)
        is_digested = unit.is_digested and (digests or (check_source is not None and not encoder))
        digest = new_digest(fqn) if is_digested else None
        scales_digest = new_digest(encoder.scales) if encoder and digests and unit.is_digested else None
        source_digest = None
        if check_source and unit.is_digested and (encoder or fqn in changed):
            source_digest = TensorDigest(source.tensors[fqn].dtype, source.tensors[fqn].shape)

        def add(digest: TensorDigest, box: Box, array: np.ndarray) -> None:
            rows = digest.row_numbers(box)
            digest.update(box, array, rows=native_rows(fqn, rows) if native_rows else rows)

        def write(fqn: str, box: Box, array: np.ndarray) -> None:
            if writer.write(unit.writing, fqn, box, array):
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
        writer.end(unit.writing)
        if not unit.is_counted:
            unit.moved = unit.non_finite = unit.overflows = 0
        unit.digest = digest.partial if digest else None
        unit.source_digest = source_digest.partial if source_digest else None
        unit.scales_digest = scales_digest.partial if scales_digest else None
        return unit

    sums = {fqn: new_digest(fqn) for fqn in target.tensors}
    source_sums = {
        fqn: TensorDigest(source.tensors[fqn].dtype, source.tensors[fqn].shape) for fqn in (*changed, *encoders)
    }
    filled = [0] * len(target.slots)
    overflows: dict[str, int] = {}
    # Closed in this order in any case: first the threads stop writing, then the files are closed.
    results = in_parallel(run, units, workers)
    with deferred_signals() as deliver_signals, writer, closing(results):
        for unit in results:
            deliver_signals()
            for piece in unit.writing.runs.values():  # units are in order, and so are the pieces of each slot
                assert piece.offset == filled[piece.slot], f"{unit.fqn}: a gap in a slot"
                result.crc32[piece.slot] = join_crc32(result.crc32[piece.slot], piece.crc32, piece.length)
                filled[piece.slot] += piece.length
            writer.take(unit.writing)
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
            raise _overflow_error(overflows, casts)
        for slot, num_bytes in zip(target.slots, filled, strict=True):
            assert num_bytes == slot.num_bytes, f"{slot.fqn}: a slot was not filled"
        result.files = writer.finish(result.crc32)
    if digests:
        result.digests = {fqn: digest.hexdigest() for fqn, digest in sums.items()}
    return result


def _overflow_error(overflows: Mapping[str, int], casts: Mapping[str, str]) -> CheckpointError:
    lost = [
        f"{fqn}: {count:,} {'value does' if count == 1 else 'values do'} not fit {casts[fqn]}"
        for fqn, count in overflows.items()
    ]
    return CheckpointError(f"the cast overflows:{list_offenders(lost)}", hint="choose a wider --dtype")


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
    """The work, tensor by tensor."""
    number, scales = 0, {encoder.scales for encoder in encoders.values()}
    for fqn, info in target.tensors.items():
        if fqn in scales:
            continue
        encoder = encoders.get(fqn)
        shape = source.tensors[fqn].shape if encoder else info.shape
        for boxes in _unit_boxes(source, fqn, Box.whole(shape), encoder):
            yield _Unit(number, fqn, boxes, Writing(None))
            number += 1


def _units_in_order(
    source: TensorSource, target: Target, encoders: Mapping[str, Encoder], twice: Sequence[str]
) -> Iterator[_Unit]:
    """The work, slot by slot, and first the digests of tensors whose slots cut rows, or that have no slot (tied)."""
    weights = {encoder.scales: fqn for fqn, encoder in encoders.items()}
    cut = {fqn for fqn in twice if fqn not in encoders}
    slotted = {slot.fqn for slot in target.slots}
    numbers, seen = count(), set[tuple[str, Box]]()
    for fqn, info in target.tensors.items():
        if fqn in cut or fqn not in slotted:
            for boxes in _unit_boxes(source, fqn, Box.whole(info.shape), None):
                yield _Unit(next(numbers), fqn, boxes, Writing(None), is_counted=fqn not in cut)
    for number, slot in enumerate(target.slots):
        fqn, is_repeated = weights.get(slot.fqn, slot.fqn), (slot.fqn, slot.box) in seen
        seen.add((slot.fqn, slot.box))
        is_counted = slot.fqn not in weights and not is_repeated  # scales are made once more, before their codes
        encoder = encoders.get(fqn)
        assert not encoder or slot.box == Box.whole(target.tensors[slot.fqn].shape), f"{fqn}: codes are cut"
        box = Box.whole(source.tensors[fqn].shape) if encoder else slot.box
        for boxes in _unit_boxes(source, fqn, box, encoder):
            is_digested = is_counted and fqn not in cut
            yield _Unit(next(numbers), fqn, boxes, Writing(number), is_digested, is_counted)


def _read_twice(target: Target, encoders: Mapping[str, Encoder], *, digested: bool) -> list[str]:
    """Tensors that are read a second time if files are written in order.

    Their digest is a sum over whole rows, which their slots cut, or they have scales, which are written before codes.
    """
    cut = {slot.fqn for slot in target.slots if not has_whole_rows(slot.box, target.tensors[slot.fqn].shape)}
    return [fqn for fqn in target.tensors if fqn in encoders or (digested and fqn in cut)]


def _unit_boxes(source: TensorSource, fqn: str, box: Box, encoder: Encoder | None) -> Iterator[list[Box]]:
    """The boxes of each unit of a box of a tensor, in row-major order."""
    width = itemsize(source.tensors[fqn].dtype)
    unit_boxes: list[Box] = []
    row_bytes = (box.sizes[-1] if len(box.sizes) > 1 else 1) * width
    block_bytes = _block_bytes(source, fqn, row_bytes)
    if encoder:
        block_bytes = max(_whole_blocks(encoder.rows * row_bytes), block_bytes)
        block_bytes -= block_bytes % (encoder.rows * row_bytes)
    for boxes in whole_row_units(box.sizes, width, block_bytes):
        unit_boxes += boxes
        if sum(box.num_elements for box in unit_boxes) * width > UNIT_BYTES - BLOCK_BYTES:
            yield [_moved(each, box) for each in unit_boxes]
            unit_boxes = []
    if unit_boxes:
        yield [_moved(each, box) for each in unit_boxes]


def _moved(inner: Box, outer: Box) -> Box:
    """A box of a box as one of the tensor."""
    return Box(tuple(a + b for a, b in zip(outer.offsets, inner.offsets, strict=True)), inner.sizes)


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
                yield _moved(block, read), array[block.slices_within(Box.whole(read.sizes))]


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
