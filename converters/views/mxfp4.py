"""Weights in mxfp4: 4-bit codes (e2m1) with a power-of-two scale for each 32 of a row; decode, scale and encode blocks.

A byte has two codes, the first value's in its low half. A scale byte s stands for 2^(s - 127), and 255 for NaN (OCP
Microscaling Formats, version 1.0). Every product is exact in bfloat16; those beyond its range are infinite there.
"""

from functools import cache
from typing import Any

import numpy as np

from converters.common.dtypes import numpy_dtype

BLOCK = 32  # values with one scale
CODE_BYTES = BLOCK // 2
LARGEST = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are their negatives
NOT_A_NUMBER = 255  # a scale

_BIAS = 127
_LARGEST_EXPONENT = 2  # of VALUES: 4.0
_SMALLEST = 1 << 22  # the bits of 2^-127 in float32
_AT_ONCE = 1 << 17  # values at a time: the temporaries (numpy's 64-bit indices, too) stay in a core's cache
_HALF_STEP, _OLD_BIAS = 0x1FFFFF, 126 << 1  # half of e2m1's last bit in float32; float32's exponent bias minus e2m1's
_SUBNORMAL = np.float32(1 << 22)  # its last bit is 0.5, as that of e2m1's subnormal numbers
_Array = np.ndarray[Any, Any]


def decode(codes: _Array, scales: _Array, dtype: str) -> _Array:
    """The values [..., 32 · n] of `codes` [..., n, 16] and `scales` [..., n], all uint8, in float32 or bfloat16."""
    table = value_pairs(dtype)
    blocks, of_blocks = codes.reshape(-1, CODE_BYTES), scales.reshape(-1)
    pairs = np.empty(blocks.shape, table.dtype)
    step = _AT_ONCE // BLOCK
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        numbers = blocks[part].astype(np.uint16)
        numbers |= of_blocks[part].astype(np.uint16)[:, None] << np.uint16(8)
        np.take(table, numbers, out=pairs[part], mode="wrap")
    values: _Array = pairs.view(numpy_dtype(dtype)).reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)
    return values


@cache
def value_pairs(dtype: str) -> _Array:
    """The two values of each byte of codes, as one number, for each scale: number 256 · scale + byte."""
    byte = np.arange(256)
    table = np.array([*VALUES, *(-value for value in VALUES)], np.float32)
    factors = scale_values(np.arange(256))
    with np.errstate(over="ignore", invalid="ignore"):
        both = np.stack([table[byte & 15], table[byte >> 4]], axis=-1) * factors[:, None, None]
        kind = numpy_dtype(dtype)
        pairs: _Array = both.astype(kind).view(np.dtype(f"u{2 * kind.itemsize}")).reshape(-1)
    return pairs


def block_amax(values: _Array) -> _Array:
    """The largest |value| of each block of `values` [..., 32 · n], float32 [..., n]; NaN or infinite if one is."""
    bits = values.view(np.dtype(f"u{values.itemsize}"))
    magnitude = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)  # as integers, magnitudes have the order of values
    blocks = (bits & magnitude).reshape(*bits.shape[:-1], bits.shape[-1] // BLOCK, BLOCK)
    found: _Array = blocks.max(axis=-1).view(values.dtype).astype(np.float32)
    return found


def scales_rounded_up(amax: _Array) -> _Array:
    """The scale bytes 2^⌈log2(amax / 6)⌉, so that no value is clipped; 0 for blocks of zeros.

    The rule of the gpt-oss releases (downcast_to_mxfp of triton_kernels), which computes amax / 6 in float32. It has no
    scale of 2^-127: here 0 is that, too, so that the values of every block are kept when it is quantized again.
    """
    bits = (amax / np.float32(LARGEST)).view(np.uint32)
    scales = ((bits + np.uint32(0x7FFFFF)) >> np.uint32(23)).astype(np.uint8)
    return np.where(bits <= _SMALLEST, np.uint8(0), scales)


def scales_rounded_down(amax: _Array) -> _Array:
    """The scale bytes 2^(⌊log2 amax⌋ - 2), at least 2^-127: the largest values of a block may be clipped to 6.

    The rule of the OCP specification (section 6.3), and torchao's default (ScaleCalculationMode.FLOOR).
    """
    exponents = (amax.view(np.uint32) >> np.uint32(23)).astype(np.int32)
    return np.maximum(exponents - _LARGEST_EXPONENT, 0).astype(np.uint8)


def scale_values(scales: _Array) -> _Array:
    """Scale bytes as float32; 255 is NaN."""
    is_number = scales != NOT_A_NUMBER
    return np.where(is_number, np.ldexp(np.float32(1), np.where(is_number, scales.astype(np.int32) - _BIAS, 0)), np.nan)


def encode(values: _Array, scales: _Array) -> _Array:
    """The codes, uint8 [..., n, 16], of `values` [..., 32 · n] (finite; float32 or bfloat16) with `scales` [..., n].

    A value is divided by its scale and rounded to the nearest code, ties to the even one, at most ±6.
    """
    codes = np.empty((scales.size, CODE_BYTES), np.uint8)
    blocks, factors = values.reshape(-1, BLOCK), np.ldexp(np.float32(1), _BIAS - scales.reshape(-1, 1).astype(np.int32))
    step = _AT_ONCE // BLOCK
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        wide = blocks[part].astype(np.float32)
        wide *= factors[part]
        nibbles = _rounded_to_e2m1(wide)
        codes[part] = nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)
    return codes.reshape(*scales.shape, CODE_BYTES)


def _rounded_to_e2m1(values: _Array) -> _Array:
    """The nearest e2m1 codes of float32 values, ties to even, at most ±6. Changes `values`."""
    bits = values.view(np.uint32)
    signs = bits >> np.uint32(28)
    signs &= np.uint32(8)
    bits &= np.uint32(0x7FFFFFFF)
    np.fmin(values, np.float32(LARGEST), out=values)
    small = (values + _SUBNORMAL).view(np.uint32)
    small -= _SUBNORMAL.view(np.uint32)  # in units of 0.5: the code of a subnormal number
    odd = bits >> np.uint32(22)
    odd &= np.uint32(1)
    bits += odd + np.uint32(_HALF_STEP)
    bits >>= np.uint32(22)
    # below 1 the first is larger than 2 at most by rounding, and above it the second is the smaller one
    np.maximum(bits, np.uint32(_OLD_BIAS + 2), out=bits)
    bits -= np.uint32(_OLD_BIAS)
    np.minimum(bits, small, out=bits)
    bits |= signs
    return bits.astype(np.uint8)
