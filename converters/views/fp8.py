"""Weights in float8 (e4m3) with one scale per block of rows and columns: decode, scale and encode blocks.

A value is float32(code) · scale of its block, one float32 product, rounded once (DeepSeek-V3, inference/kernel.py,
weight_dequant). Scales and codes of new blocks are those of DeepGEMM's per_block_cast_to_fp8.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from converters.common.dtypes import numpy_dtype

LARGEST = 448.0  # of the finite e4m3 values
_SATURATES = 464.0  # half a step above it: from here on rounding would end at 512, which e4m3 does not have
_SMALLEST_AMAX = 1e-4
_STRIPE_ELEMENTS = 1 << 15  # encoded at a time: the temporaries stay in a core's cache
_HALF, _OLD_BIAS = 0x7FFFF, 120 << 3  # half of e4m3's last bit in float32; float32's exponent bias minus e4m3's
_SUBNORMAL = np.float32(16384.0)  # its last bit is 2^-9, as that of e4m3's subnormal numbers
_Array = np.ndarray[Any, Any]


def num_blocks(size: int, block: int) -> int:
    """Blocks along a dim, the last one possibly partial."""
    return -(-size // block)


def decode(codes: _Array, scales: _Array, block: tuple[int, int], *, start: tuple[int, int], dtype: str) -> _Array:
    """The values of `codes` [rows, columns] in `dtype`, float32 or bfloat16.

    `start`: row and column of the first code in its tensor; `scales`: of the blocks that the codes touch.
    """
    kind = numpy_dtype(dtype)
    raw = np.dtype(f"u{kind.itemsize}")
    codes = codes.view(np.uint8)
    values = np.empty(codes.shape, raw)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, rows in _pieces(start[0], codes.shape[0], block[0]):
            products = _values() * scales[i].astype(np.float32)[:, None]
            tables = products.astype(kind).view(raw)  # what each code means in a block
            for j, columns in _pieces(start[1], codes.shape[1], block[1]):
                np.take(tables[j], codes[rows, columns], out=values[rows, columns], mode="wrap")
    return values.view(kind)


@cache
def _values() -> _Array:
    """The float32 value of each code."""
    return np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn")).astype(np.float32)


def _pieces(start: int, size: int, block: int) -> Iterator[tuple[int, slice]]:
    """The parts of a range that lie in one block each: the block's number among those touched, and the part."""
    first = start // block
    for number in range(num_blocks(start + size, block) - first):
        begin = (first + number) * block - start
        yield number, slice(max(0, begin), min(size, begin + block))


def block_amax(values: _Array, block: tuple[int, int]) -> _Array:
    """The largest |value| of each block of `values` [rows, columns], float32. They begin at a block."""
    bits = values.view(np.dtype(f"u{values.itemsize}"))
    magnitude = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)  # as integers, magnitudes have the order of values
    row_starts, column_starts = (range(0, size, step) for size, step in zip(bits.shape, block, strict=True))
    largest = np.empty((len(row_starts), bits.shape[1]), bits.dtype)
    for i, row in enumerate(row_starts):
        rows = bits[row : row + block[0]]
        stripe = max(1, _STRIPE_ELEMENTS // max(1, bits.shape[1]))
        amax = np.zeros(bits.shape[1], bits.dtype)
        for first in range(0, len(rows), stripe):
            np.maximum(amax, (rows[first : first + stripe] & magnitude).max(axis=0), out=amax)
        largest[i] = amax
    amax = np.maximum.reduceat(largest, list(column_starts), axis=1)
    return amax.view(values.dtype).astype(np.float32)


def scales_of(amax: _Array, *, power_of_two: bool) -> _Array:
    """The scales, float32: amax / 448, at least 1e-4 / 448; or the power of two that is not less."""
    scales = np.maximum(amax, np.float32(_SMALLEST_AMAX)) / np.float32(LARGEST)
    if not power_of_two:
        return scales
    bits = scales.view(np.uint32)
    bits += np.uint32(0x7FFFFF)  # the next exponent unless the mantissa is zero
    bits &= np.uint32(0xFF800000)
    return scales


def saturated(amax: _Array, scales: _Array) -> _Array:
    """A flag for each block: whether it has values that its scale cannot represent, so that codes are clipped."""
    return (amax > 0) & (amax.astype(np.float64) >= _SATURATES * scales.astype(np.float64))


def encode(values: _Array, amax: _Array, scales: _Array, block: tuple[int, int], *, exact: _Array) -> _Array:
    """The codes, uint8, of `values` [rows, columns], which begin at a block, are finite, and float32 or bfloat16.

    A block's factor is 448 / amax, as in DeepGEMM, if `exact` (one flag per block) is false; if it is true the
    values are divided by `scales`.
    """
    codes = np.empty(values.shape, np.uint8)
    # torch computes 448.0 / amax as amax.reciprocal() * 448.0: two roundings, which decide some ties
    factors = np.float32(1) / np.maximum(amax, np.float32(_SMALLEST_AMAX)) * np.float32(LARGEST)
    stripe = max(1, _STRIPE_ELEMENTS // max(1, values.shape[1]))
    for i, rows in _pieces(0, values.shape[0], block[0]):
        factor = _along_columns(factors[i], block[1], values.shape[1])
        divided = _along_columns(exact[i], block[1], values.shape[1])
        scale = np.where(scales[i] == 0, np.float32(1), scales[i])  # of a block of zeros
        divisor = _along_columns(scale, block[1], values.shape[1]) if divided.any() else None
        for first in range(rows.start, rows.stop, stripe):
            part = slice(first, min(first + stripe, rows.stop))
            wide = _widened(values[part])
            if divisor is None:
                wide *= factor
            else:
                wide = np.where(divided, wide / divisor, wide * factor)
            _round_to_e4m3(wide, out=codes[part])
    return codes


def _widened(values: _Array) -> _Array:
    """A copy in float32; of bfloat16 by a shift, which is faster than ml_dtypes' cast."""
    if values.dtype != numpy_dtype("bfloat16"):
        return values.astype(np.float32)
    bits = values.view(np.uint16).astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def _along_columns(of_blocks: _Array, width: int, columns: int) -> _Array:
    return np.repeat(of_blocks, min(width, columns))[:columns]


def _round_to_e4m3(values: _Array, *, out: _Array) -> None:
    """Round float32 to the nearest e4m3 codes, ties to even, at most ±448. Changes `values`."""
    bits = values.view(np.uint32)
    signs = bits >> np.uint32(24)
    signs &= np.uint32(0x80)
    bits &= np.uint32(0x7FFFFFFF)
    np.fmin(values, np.float32(LARGEST), out=values)
    small = (values + _SUBNORMAL).view(np.uint32)
    small -= _SUBNORMAL.view(np.uint32)  # in units of 2^-9: the code of a subnormal number
    odd = bits >> np.uint32(20)
    odd &= np.uint32(1)
    odd += np.uint32(_HALF)
    bits += odd
    bits >>= np.uint32(20)
    # below 2^-6 the first is larger than 8 at most by rounding, and above it the second is the smaller one
    np.maximum(bits, np.uint32(_OLD_BIAS + 8), out=bits)
    bits -= np.uint32(_OLD_BIAS)
    np.minimum(bits, small, out=bits)
    bits |= signs
    out[...] = bits
