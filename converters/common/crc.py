"""CRC32 with vector instructions, and that of two pieces from theirs, so that threads can hash blocks in any order.

`crc32` is zlib's function: the same values, 4 to 20 times as fast (benchmarks: docs/benchmarks.md).

Files are not read again to compute their CRC32: that would double the traffic of a conversion and, coming from the page
cache, prove nothing about the disk. `titan verify` reads the disk.
"""

from functools import lru_cache

from isal.isal_zlib import crc32

__all__ = ["crc32", "join_crc32"]

_POLYNOMIAL = 0xEDB88320


def join_crc32(first: int, second: int, second_bytes: int) -> int:
    """CRC32 of A + B from crc32(A), crc32(B) and len(B)."""
    if first == 0 or second_bytes == 0:
        return first if second_bytes == 0 else second
    return _multiply(_power_of_x(8 * second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """a(x) · b(x) modulo the CRC polynomial; bit 31 is x⁰."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    """x to the power `exponent` modulo the polynomial, by squaring."""
    power, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        exponent >>= 1
    return power
