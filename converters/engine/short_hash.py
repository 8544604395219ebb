"""xxh3_128 of very many inputs of 1 to 8 bytes, each with a seed of its own, summed up: one numpy pass for all.

The digest of a vector hashes each element (digest.py); a call of xxhash for each takes 200 ns, this 15. It is the
published algorithm for short inputs (XXH3_len_1to3_128b and XXH3_len_4to8_128b of xxhash 0.8) on arrays, and a test
holds it equal to the library.
"""

import numpy as np

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
