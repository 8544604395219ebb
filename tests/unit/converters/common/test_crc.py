"""CRC32s are zlib's, and those joined from parts equal the CRC32 of the whole."""

import random
from zlib import crc32 as zlib_crc32

from hypothesis import given
from hypothesis import strategies as st

from converters.common.crc import crc32, join_crc32


@given(st.binary(max_size=5000), st.integers(0, 5000), st.integers(0, 2**32 - 1))
def test_the_values_are_those_of_zlib(data, start, value):
    part = memoryview(data)[start:]
    assert crc32(part, value) == zlib_crc32(part, value) and crc32(part) == zlib_crc32(part)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_parts(first, second):
    assert join_crc32(crc32(first), crc32(second), len(second)) == crc32(first + second)


def test_many_large_parts():
    generator = random.Random(0)
    parts = [generator.randbytes(generator.randrange(1, 1 << 16)) for _ in range(20)]
    joined = 0
    for part in parts:
        joined = join_crc32(joined, crc32(part), len(part))
    assert joined == crc32(b"".join(parts))
