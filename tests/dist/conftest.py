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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A token index for tiny runs."""
    from tests.dist import runs

    return runs.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(pools, data, tmp_path_factory):
    """The dump folder of an FSDP run of four steps that nothing happened to; saved at 2 and 4, which is waited for."""
    from tests.dist import runs

    dump = tmp_path_factory.mktemp("whole")
    assert pools[2].run(runs.run, runs.make_config(data, dump, **runs.FSDP2)) == ["", ""]
    return dump
