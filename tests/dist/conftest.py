"""Ranks for the tests of this folder: `pools[4].run(case, …)`."""

import pytest

from tests.dist.pool import Pool


class Pools(dict):
    """Pools by size, started when first used."""

    def __missing__(self, size: int) -> Pool:
        self[size] = Pool(size)
        return self[size]


@pytest.fixture(scope="session")
def pools():
    pools = Pools()
    yield pools
    for pool in pools.values():
        pool.stop()
