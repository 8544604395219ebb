"""Ranks for the tests of this folder: `pools[4].run(case, …)`."""

import pytest
import torch

from tests.dist.pool import Pool, SplitBackwardRefused


class Pools(dict):
    """Pools by size, started when first used."""

    def __missing__(self, size: int) -> Pool:
        self[size] = Pool(size)
        return self[size]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Before torch 2.13, which splits backward wrongly, a test of such schedules shows that they are refused."""
    if torch.__version__ >= (2, 13):
        return (yield)
    try:
        return (yield)
    except SplitBackwardRefused:
        return True


@pytest.fixture(scope="session")
def pools():
    pools = Pools()
    yield pools
    for pool in pools.values():
        pool.stop()
