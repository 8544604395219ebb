"""The units of a copy: work of one thread, which is consecutive boxes of one tensor, and its results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import numpy as np

from converters.common.box import Box, TensorSource
from converters.common.dtypes import itemsize
from converters.containers.target import Target
from converters.engine.writers import Writing, WrittenRun
from converters.store.digest import has_whole_rows
from converters.views.encoder import Encoder
from converters.views.view import View

BLOCK_BYTES = 1 << 20  # read, hashed and written at a time: fits into a core's cache
UNIT_BYTES = 8 << 20  # the work of a thread, and of a line of the journal
MOST_BYTES = 12 << 20  # that are read at a time where a view asks for rows together

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


@dataclass(slots=True)
class Unit:
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


def units_of(source: TensorSource, target: Target, encoders: Mapping[str, Encoder]) -> Iterator[Unit]:
    """The work, tensor by tensor."""
    number, scales = 0, {encoder.scales for encoder in encoders.values()}
    for fqn, info in target.tensors.items():
        if fqn in scales:
            continue
        encoder = encoders.get(fqn)
        shape = source.tensors[fqn].shape if encoder else info.shape
        for boxes in _unit_boxes(source, fqn, Box.whole(shape), encoder):
            yield Unit(number, fqn, boxes, Writing(None))
            number += 1


def units_in_order(
    source: TensorSource, target: Target, encoders: Mapping[str, Encoder], twice: Sequence[str]
) -> Iterator[Unit]:
    """The work, slot by slot, and first the digests of tensors whose slots cut rows, or that have no slot (tied)."""
    weights = {encoder.scales: fqn for fqn, encoder in encoders.items()}
    cut = {fqn for fqn in twice if fqn not in encoders}
    slotted = {slot.fqn for slot in target.slots}
    numbers, seen = count(), set[tuple[str, Box]]()
    for fqn, info in target.tensors.items():
        if fqn in cut or fqn not in slotted:
            for boxes in _unit_boxes(source, fqn, Box.whole(info.shape), None):
                yield Unit(next(numbers), fqn, boxes, Writing(None), is_counted=fqn not in cut)
    for number, slot in enumerate(target.slots):
        fqn, is_repeated = weights.get(slot.fqn, slot.fqn), (slot.fqn, slot.box) in seen
        seen.add((slot.fqn, slot.box))
        is_counted = slot.fqn not in weights and not is_repeated  # scales are made once more, before their codes
        encoder = encoders.get(fqn)
        assert not encoder or slot.box == Box.whole(target.tensors[slot.fqn].shape), f"{fqn}: codes are cut"
        box = Box.whole(source.tensors[fqn].shape) if encoder else slot.box
        for boxes in _unit_boxes(source, fqn, box, encoder):
            is_digested = is_counted and fqn not in cut
            yield Unit(next(numbers), fqn, boxes, Writing(number), is_digested, is_counted)


def find_read_twice(target: Target, encoders: Mapping[str, Encoder], *, digested: bool) -> list[str]:
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


def read_blocks(
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
