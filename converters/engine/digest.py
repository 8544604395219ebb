"""A digest of a tensor's values that does not depend on how it is cut, stored or named.

Sum modulo 2¹²⁸ of xxh3_128(row, seed = row number), over rows along the last dim (a 1-D tensor has one row per
element), plus the hash of dtype and shape. Rows can be added in any order and by any process. The row number is the
native one: for a container that stores rows in another order (q and k of Hugging Face) their native numbers are given.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from xxhash import xxh3_128, xxh3_128_intdigest

from converters.catalog import Box
from converters.dtypes import itemsize
from converters.engine.short_hash import MAX_BYTES, sum_of_hashes

_MODULUS = 1 << 128
_FEW = 64  # rows that are hashed one by one


class TensorDigest:
    """Adds up the rows of one tensor. Boxes may come in any order, but a row longer than a box from left to right."""

    def __init__(self, dtype: str, shape: Sequence[int]):
        self.dtype = dtype
        self.shape = tuple(shape)
        self._row_dims = self.shape[:-1] if len(self.shape) > 1 else self.shape
        self._row_elements = self.shape[-1] if len(self.shape) > 1 else 1
        self._sum = 0
        self._open: dict[int, tuple[xxh3_128, int]] = {}  # row → (its hash so far, elements seen)

    def update(self, box: Box, array: np.ndarray, *, rows: Sequence[int] | None = None) -> None:
        """Add the values of a box. `rows`: the native number of each row of it, where the order differs."""
        if array.size == 0:
            return
        numbers = rows if rows is not None else self.row_numbers(box)
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        width = len(data) // len(numbers)
        if width != self._row_elements * itemsize(self.dtype):
            self._update_parts(box, numbers, data, width)
            return
        if width <= MAX_BYTES and len(numbers) > _FEW:
            total = sum_of_hashes(np.frombuffer(data, np.uint8).reshape(-1, width), _as_array(numbers))
        else:
            total = 0
            for position, number in enumerate(_plain(numbers)):
                total += xxh3_128_intdigest(data[position * width : (position + 1) * width], number)
        self._sum = (self._sum + total) % _MODULUS

    def row_numbers(self, box: Box) -> Sequence[int]:
        """The numbers of the rows that a box touches, in the box's own row-major order."""
        dims = self._row_dims
        offsets, sizes = box.offsets[: len(dims)], box.sizes[: len(dims)]
        if len(dims) <= 1:
            return range(offsets[0], offsets[0] + sizes[0]) if dims else range(1)
        strides = [prod(dims[d + 1 :]) for d in range(len(dims))]
        index = np.indices(sizes).reshape(len(sizes), -1)
        return np.array(strides) @ (index + np.array(offsets)[:, None])

    @property
    def partial(self) -> int:
        """The sum so far, to be sent to another process."""
        return self._sum

    def add_partial(self, value: int) -> None:
        """Add another process's `partial`."""
        self._sum = (self._sum + value) % _MODULUS

    def hexdigest(self) -> str:
        """32 hex digits. Only meaningful once every row was added exactly once."""
        assert not self._open, "a row was begun and not finished"
        header = xxh3_128_intdigest(f"{self.dtype} {list(self.shape)}".encode())
        return f"{(self._sum + header) % _MODULUS:032x}"

    def _update_parts(self, box: Box, numbers: Sequence[int], data: memoryview, width: int) -> None:
        # A row too long for a block arrives in parts; the hash of each row stays open until its end was seen.
        start, count = box.offsets[-1], box.sizes[-1]
        for position, number in enumerate(_plain(numbers)):
            state, seen = self._open.pop(number, None) or (xxh3_128(seed=number), 0)
            if seen != start:
                raise ValueError(f"row {number}: elements from {start} on, but {seen} were seen; digest whole rows")
            state.update(data[position * width : (position + 1) * width])
            if start + count == self._row_elements:
                self._sum = (self._sum + state.intdigest()) % _MODULUS
            else:
                self._open[number] = (state, start + count)


def _plain(numbers: Sequence[int]) -> Sequence[int]:
    """Python's own integers, which xxhash takes as seeds."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def _as_array(numbers: Sequence[int]) -> np.ndarray:
    """The numbers as an array; of a range without making each of them an object."""
    return np.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else np.asarray(numbers)
