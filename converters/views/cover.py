"""Check that chunks cover each element of a tensor exactly once, and find the chunks that overlap a box."""

from collections.abc import Sequence
from math import prod

import numpy as np

from converters.common.box import Box
from converters.common.errors import CheckpointError, list_offenders
from converters.views.catalog import Catalog, TensorEntry


def require_cover(catalog: Catalog) -> Catalog:
    """The catalog itself. Raises CheckpointError with every tensor whose chunks do not cover it exactly."""
    problems = [f"{fqn}: {why}" for fqn, entry in catalog.tensors.items() if (why := cover_problem(entry))]
    if problems:
        raise CheckpointError(
            f"{catalog.root}: chunks do not cover these tensors exactly:{list_offenders(problems)}",
            hint="a rank's part is missing or listed twice; stock DCP would leave the rest uninitialized",
        )
    return catalog


def cover_problem(entry: TensorEntry) -> str | None:
    """Why the chunks do not cover the tensor (outside, overlap, hole), or None."""
    if len(entry.chunks) == 1 and entry.chunks[0].box == Box.whole(entry.shape):
        return None
    boxes = [chunk.box for chunk in entry.chunks if chunk.box.num_elements]
    for box in boxes:
        if len(box.sizes) != len(entry.shape) or len(box.offsets) != len(entry.shape):
            return f"has {len(entry.shape)} dims, but a chunk with {len(box.sizes)}"
        if any(o + n > size for o, n, size in zip(box.offsets, box.sizes, entry.shape, strict=True)):
            return f"the chunk at {box.offsets} of sizes {box.sizes} is outside the shape {entry.shape}"
    covered, total = sum(box.num_elements for box in boxes), prod(entry.shape)
    if len(boxes) > 1 and overlap(boxes):
        return "chunks overlap"
    if covered != total:
        return f"chunks cover {covered:,} of {total:,} elements"
    return None


def overlap(boxes: list[Box]) -> bool:
    """Whether any two boxes share an element. Only boxes that overlap along one well-chosen dim are compared."""
    low = np.array([box.offsets for box in boxes], dtype=np.int64)
    high = low + np.array([box.sizes for box in boxes], dtype=np.int64)
    if low.shape[1] == 0:
        return len(boxes) > 1
    # The dim with the most distinct cuts leaves the fewest pairs: rows for FSDP, columns for a row-parallel TP.
    dim = max(range(low.shape[1]), key=lambda d: len(np.unique(low[:, d])))
    order = np.argsort(low[:, dim], kind="stable")
    low, high = low[order], high[order]
    ends = np.searchsorted(low[:, dim], high[:, dim], side="left")
    widest = int((ends - np.arange(len(boxes))).max())
    for distance in range(1, widest):  # all pairs (i, i + distance) at once
        common = (low[distance:] < high[:-distance]) & (low[:-distance] < high[distance:])
        if common.all(axis=1).any():
            return True
    return False


_FEW = 8  # up to so many a loop over all boxes is faster than numpy


class BoxIndex:
    """Boxes of one tensor, searchable by overlap."""

    def __init__(self, boxes: Sequence[Box]):
        self._num_boxes = len(boxes)
        if len(boxes) > _FEW:
            self._low = np.array([box.offsets for box in boxes], dtype=np.int64)
            self._high = self._low + np.array([box.sizes for box in boxes], dtype=np.int64)

    def touching(self, box: Box) -> Sequence[int]:
        """Positions of all boxes that share elements with `box`, and possibly of others."""
        if self._num_boxes <= _FEW:
            return range(self._num_boxes)
        low = np.array(box.offsets, dtype=np.int64)
        common = (self._low < low + np.array(box.sizes, dtype=np.int64)) & (low < self._high)
        return np.flatnonzero(common.all(axis=1)).tolist()
