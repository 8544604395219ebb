"""Compare the values of two tensors block by block: bits first, numbers only where bits differ."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan, prod

import numpy as np

from converters.common.box import Box, TensorSource, row_blocks
from converters.common.dtypes import itemsize
from converters.common.sizes import MIB

BLOCK_BYTES = 8 * MIB


_AT_ONCE = 1 << 20  # elements that are widened at a time: their float64 values stay in the cache


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of two tensors of one shape. `num_different` is 0 if only bits or dtypes differ."""

    num_different: int
    first: tuple[int, ...] | None  # index of the first element that differs
    max_abs: float  # max |A - B|
    relative: float  # ‖A - B‖ / ‖A‖
    rounded: str  # "A" or "B" if that one equals the other cast to its dtype; else ""
    experts: tuple[int, ...] = ()  # of a stack: the numbers along dim 0 of those that differ


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype and shape hold the same bytes."""
    return np.array_equal(_bytes(a), _bytes(b))


def _bytes(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.view(np.uint64) if flat.size % 8 == 0 else flat


def first_differing_block(a: TensorSource, name_a: str, b: TensorSource, name_b: str) -> Box | None:
    """The first block whose bits differ, None if all are equal. Dtypes and shapes must agree."""
    info = a.tensors[name_a]
    for box in row_blocks(Box.whole(info.shape), itemsize(info.dtype), BLOCK_BYTES):
        if not same_bits(a.read(name_a, box), b.read(name_b, box)):
            return box
    return None


def first_difference(source: TensorSource, one: str, other: str) -> str:
    """The first place where two tensors differ in their bits; "" if there is none. Reads them in blocks."""
    a, b = source.tensors[one], source.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    if block := first_differing_block(source, one, source, other):
        return f"they differ in rows {block.offsets[0]} to {block.offsets[0] + block.sizes[0] - 1}"
    return ""


def measure_gap(a: TensorSource, b: TensorSource, name: str, advance: Callable[[int], None]) -> Deviation | None:
    """The deviation of two tensors of one shape; None if dtype and all bits agree. NaN equals NaN here."""
    x, y = a.tensors[name], b.tensors[name]
    sums = _ErrorSums()
    equal_boxes: list[Box] = []  # their norm is needed only if a later block differs
    same = x.dtype == y.dtype
    rounded = {} if same else {"A": True, "B": True}
    for box in row_blocks(Box.whole(x.shape), max(itemsize(x.dtype), itemsize(y.dtype)), BLOCK_BYTES):
        left, right = a.read(name, box), b.read(name, box)
        advance(left.nbytes)
        if x.dtype == y.dtype and same_bits(left, right):
            equal_boxes.append(box)
            continue
        same = False
        with np.errstate(over="ignore", invalid="ignore"):
            for which, wide, narrow in (("A", right, left), ("B", left, right)):
                if rounded.get(which):
                    rounded[which] = same_bits(wide.astype(narrow.dtype), narrow)
        sums.add(left, right, box)
    if same:
        return None
    if not sums.num_different:
        return Deviation(0, None, 0.0, 0.0, "")
    squares_a = sums.squares_a + sum(_squares(a.read(name, box)) for box in equal_boxes)
    relative = (sums.squares_gap / squares_a) ** 0.5 if squares_a else inf
    narrower = "B" if rounded.get("B") else "A" if rounded.get("A") else ""
    return Deviation(sums.num_different, sums.first, sums.max_abs, relative, narrower, tuple(sorted(sums.experts)))


class _ErrorSums:
    """Sums over the blocks that differ."""

    def __init__(self) -> None:
        self.num_different, self.max_abs, self.squares_gap, self.squares_a = 0, 0.0, 0.0, 0.0
        self.first: tuple[int, ...] | None = None
        self.experts: set[int] = set()

    def add(self, left: np.ndarray, right: np.ndarray, box: Box) -> None:
        left, right = np.ascontiguousarray(left).reshape(-1), np.ascontiguousarray(right).reshape(-1)
        for start in range(0, left.size, _AT_ONCE):
            x, y = _widened(left[start : start + _AT_ONCE]), _widened(right[start : start + _AT_ONCE])
            self.squares_a += _norm2(x)
            with np.errstate(invalid="ignore"):  # inf - inf
                gap = np.subtract(x, y)
            differs = x != y
            if left.dtype == right.dtype and left.dtype.kind in "iu":  # float64 cannot represent large integers exactly
                differs = left[start : start + _AT_ONCE] != right[start : start + _AT_ONCE]
            if np.isnan(gap).any():
                both_nan = np.isnan(x) & np.isnan(y)
                differs &= ~both_nan
                gap[~differs] = 0  # NaN against NaN, inf against the same inf
            if not differs.any():
                continue
            if self.first is None:
                flat = start + int(np.argmax(differs))
                index = np.unravel_index(flat, box.sizes) if box.sizes else ()
                self.first = tuple(int(i) + o for i, o in zip(index, box.offsets, strict=True))
            self.num_different += int(np.count_nonzero(differs))
            if len(box.sizes) > 2:
                places = (start + np.flatnonzero(differs)) // prod(box.sizes[1:])
                self.experts |= {box.offsets[0] + int(number) for number in np.unique(places)}
            largest = float(np.abs(gap).max())
            self.max_abs = nan if largest != largest else max(self.max_abs, largest)
            self.squares_gap += _norm2(gap)


def _squares(array: np.ndarray) -> float:
    flat = np.ascontiguousarray(array).reshape(-1)
    return sum(_norm2(_widened(flat[start : start + _AT_ONCE])) for start in range(0, flat.size, _AT_ONCE))


def _norm2(values: np.ndarray) -> float:
    return float(np.vdot(values, values).real)


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
