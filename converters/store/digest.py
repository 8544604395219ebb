"""A digest of a tensor's values that does not depend on how it is cut, stored or named.

Sum modulo 2¹²⁸ of xxh3_128(row, seed = row number), over rows along the last dim (a 1-D tensor has one row per
element), plus the hash of dtype and shape. Rows can be added in any order and by any process. The row number is the
native one: a container with another order of rows (q and k of Hugging Face), or with one tensor for each expert of a
stack, passes the native numbers. So the sums of rows of a stack's parts add up to the stack's. A tensor that fuses two
native ones has its own row numbers.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from xxhash import xxh3_128, xxh3_128_intdigest

from converters.common.box import Box
from converters.common.dtypes import itemsize

_MODULUS = 1 << 128
_FEW = 64  # rows that are hashed one by one


def has_whole_rows(box: Box, shape: Sequence[int]) -> bool:
    """Whether a digest of a tensor of this shape can be summed up from this box and others, in any order."""
    return len(shape) < 2 or box.sizes[-1] == shape[-1]


def sum_of_rows(digest: str, dtype: str, shape: Sequence[int]) -> int:
    """The sum of a digest without the hash of dtype and shape, to be compared with that of a tensor's parts."""
    return (int(digest, 16) - _header(dtype, shape)) % _MODULUS


def digest_of_sum(total: int, dtype: str, shape: Sequence[int]) -> str:
    """The digest of a tensor whose rows have this sum: the inverse of `sum_of_rows`."""
    return f"{(total + _header(dtype, shape)) % _MODULUS:032x}"


def _header(dtype: str, shape: Sequence[int]) -> int:
    return xxh3_128_intdigest(f"{dtype} {list(shape)}".encode())


class TensorDigest:
    """Sums up the rows of one tensor. Boxes may be added in any order, but the parts of one row from left to right."""

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
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
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
        numbers: Sequence[int] = np.array(strides) @ (index + np.array(offsets)[:, None])
        return numbers

    @property
    def partial(self) -> int:
        """The sum so far, for another process."""
        return self._sum

    def add_partial(self, value: int) -> None:
        """Add another process's `partial`."""
        self._sum = (self._sum + value) % _MODULUS

    def hexdigest(self) -> str:
        """32 hex digits. Only meaningful once every row was added exactly once."""
        assert not self._open, "a row was begun and not finished"
        return digest_of_sum(self._sum, self.dtype, self.shape)

    def _update_parts(self, box: Box, numbers: Sequence[int], data: memoryview, width: int) -> None:
        # A row longer than a block is added in parts; its hash stays open until its end.
        start, count = box.offsets[-1], box.sizes[-1]
        for position, number in enumerate(_plain(numbers)):
            state, seen = self._open.pop(number) if number in self._open else (xxh3_128(seed=number), 0)
            if seen != start:
                raise ValueError(f"row {number}: elements from {start} on after {seen}; add whole rows")
            state.update(data[position * width : (position + 1) * width])
            if start + count == self._row_elements:
                self._sum = (self._sum + state.intdigest()) % _MODULUS
            else:
                self._open[number] = (state, start + count)


def _plain(numbers: Sequence[int]) -> Sequence[int]:
    """Python integers, which xxhash needs as seeds."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def _as_array(numbers: Sequence[int]) -> np.ndarray:
    """The numbers as an array, for a range without Python objects."""
    return np.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else np.asarray(numbers)


# The digest of a vector hashes each element: a call of xxhash for each takes 200 ns, one numpy pass for all 15. It is
# the published algorithm for inputs of 1 to 8 bytes (XXH3_len_1to3_128b and XXH3_len_4to8_128b of xxhash 0.8); a test
# compares it with the library.
MAX_BYTES = 8
_AT_ONCE = 1 << 14  # inputs; their intermediate values stay in a core's cache
_SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f")
_PRIME_1, _PRIME_2, _PRIME_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_MIX_1, _MIX_2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
_LOW = 0xFFFF_FFFF


def sum_of_hashes(data: np.ndarray, seeds: np.ndarray) -> int:
    """Sum over rows of `data` (uint8, at most 8 columns) of xxh3_128(row, seed), as a Python int."""
    hash_rows = _hash_1_to_3 if data.shape[1] < 4 else _hash_4_to_8
    total = 0
    for start in range(0, len(data), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        low, high = hash_rows(data[part], seeds[part].astype(np.uint64))
        total += _sum(low) + (_sum(high) << 64)
    return total


def _sum(values: np.ndarray) -> int:
    return int((values & _u64(_LOW)).sum()) + (int((values >> _u64(32)).sum()) << 32)


def _hash_1_to_3(data: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    length = data.shape[1]
    first, middle, last = (data[:, at].astype(np.uint32) for at in (0, length // 2, length - 1))
    low = first << np.uint32(16) | middle << np.uint32(24) | last | np.uint32(length << 8)
    high = low.byteswap()
    high = high << np.uint32(13) | high >> np.uint32(19)
    flips = [_secret(start, 4) ^ _secret(start + 4, 4) for start in (0, 8)]
    return (
        _avalanche_64(low ^ (seeds + _u64(flips[0]))),
        _avalanche_64(high ^ (_u64(flips[1]) - seeds)),
    )


def _hash_4_to_8(data: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    length = data.shape[1]
    seeds = seeds ^ (seeds.astype(np.uint32).byteswap().astype(np.uint64) << _u64(32))
    ends = [np.ascontiguousarray(data[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64) for at in (0, length - 4)]
    keyed = (ends[0] | ends[1] << _u64(32)) ^ (seeds + _u64(_secret(16, 8) ^ _secret(24, 8)))
    low, high = _multiply(keyed, _PRIME_1 + (length << 2))
    high += low << _u64(1)
    low ^= high >> _u64(3)
    low ^= low >> _u64(35)
    low *= _u64(_MIX_2)
    low ^= low >> _u64(28)
    high ^= high >> _u64(37)
    high *= _u64(_MIX_1)
    high ^= high >> _u64(32)
    return low, high


def _multiply(values: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high 64 bits of products, from products of halves."""
    a0, a1 = values & _u64(_LOW), values >> _u64(32)
    b0, b1 = _u64(factor & _LOW), _u64(factor >> 32)
    cross = a1 * b0 + (a0 * b0 >> _u64(32))  # fits: (2³² - 1)² + 2³² - 1
    other = a0 * b1 + (cross & _u64(_LOW))
    return values * _u64(factor), a1 * b1 + (cross >> _u64(32)) + (other >> _u64(32))


def _avalanche_64(values: np.ndarray) -> np.ndarray:
    values ^= values >> _u64(33)
    values *= _u64(_PRIME_2)
    values ^= values >> _u64(29)
    values *= _u64(_PRIME_3)
    values ^= values >> _u64(32)
    return values


def _secret(start: int, length: int) -> int:
    return int.from_bytes(_SECRET[start : start + length], "little")


def _u64(number: int) -> np.uint64:
    return np.uint64(number)
