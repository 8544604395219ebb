"""Find the boxes that overlap a box, for every block of tensors that are cut into thousands of chunks."""

from collections.abc import Sequence

import numpy as np

from converters.catalog import Box

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
