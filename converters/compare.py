"""Compare the values of two tensors block by block: bits first, numbers only where bits differ."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan

import numpy as np

from converters.catalog import Box, TensorSource
from converters.dtypes import itemsize
from converters.layout import row_blocks

BLOCK_BYTES = 8 * 1024**2


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two tensors of one shape are apart. `num_different` is 0 where only bits or dtypes differ."""

    num_different: int
    first: tuple[int, ...] | None  # index of the first element that differs
    max_abs: float  # max |A - B|
    relative: float  # ‖A - B‖ / ‖A‖


def first_differing_block(a: TensorSource, name_a: str, b: TensorSource, name_b: str) -> Box | None:
    """The first block whose bits differ, None where all are the same. Dtypes and shapes must agree."""
    info = a.tensors[name_a]
    for box in row_blocks(Box.whole(info.shape), itemsize(info.dtype), BLOCK_BYTES):
        if a.read(name_a, box).tobytes() != b.read(name_b, box).tobytes():
            return box
    return None


def measure_gap(a: TensorSource, b: TensorSource, name: str, advance: Callable[[int], None]) -> Gap | None:
    """The gap between two tensors of one shape; None where dtype and every bit agree. NaN equals NaN here."""
    x, y = a.tensors[name], b.tensors[name]
    same, num_different, max_abs, squares, first = x.dtype == y.dtype, 0, 0.0, 0.0, None
    for box in row_blocks(Box.whole(x.shape), max(itemsize(x.dtype), itemsize(y.dtype)), BLOCK_BYTES):
        left, right = a.read(name, box), b.read(name, box)
        advance(left.nbytes)
        if x.dtype == y.dtype and left.tobytes() == right.tobytes():
            continue
        same = False
        left, right = _widened(left), _widened(right)
        differs = (left != right) & ~(np.isnan(left) & np.isnan(right))
        if not differs.any():
            continue
        if first is None:
            first = tuple(int(i + o) for i, o in zip(np.argwhere(differs)[0], box.offsets, strict=True))
        num_different += int(differs.sum())
        with np.errstate(invalid="ignore"):  # inf - inf
            gaps = np.abs(left[differs] - right[differs])
        max_abs = nan if np.isnan(gaps).any() else max(max_abs, float(gaps.max()))
        squares += float(np.square(gaps).sum())
    if same:
        return None
    norm = _norm(a, name) if num_different else 0.0
    return Gap(num_different, first, max_abs, squares**0.5 / norm if norm else (inf if num_different else 0.0))


def _norm(source: TensorSource, name: str) -> float:
    info = source.tensors[name]
    blocks = row_blocks(Box.whole(info.shape), itemsize(info.dtype), BLOCK_BYTES)
    return sum(float(np.square(np.abs(_widened(source.read(name, box)))).sum()) for box in blocks) ** 0.5


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
