"""Ranks for the tests of this folder: `pools[4].run(case, …)`, and those of a command."""

import sys

import pytest
import torch

from tests.dist.infer_ranks import OF_A_LAUNCH, Started
from tests.dist.pool import Pool, SplitBackwardRefused
from titan_tools import cli


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


@pytest.fixture(scope="module", autouse=True)
def two_layers():
    """The flavor of runs.make_config, as the ranks of pools know it."""
    from tests.dist import runs

    with runs.two_layers():
        yield


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


@pytest.fixture
def titan_and_ranks(monkeypatch, capfd):
    """`titan_and_ranks("infer", …)` → exit code, stdout, stderr, those of started ranks included."""
    # what a launch sets in the environment is taken back; what makes a rank of this process must not be there
    for name in (*OF_A_LAUNCH, "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["titan", *map(str, arguments)])
        code = cli.run()
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def started(tmp_path):
    """`started(*arguments)`: two ranks of `titan`, which do not outlive the test."""
    running = []

    def start(*arguments, **more):
        running.append(Started(tmp_path, *arguments, **more))
        return running[-1]

    yield start
    for process in (process for one in running for process in one.processes):
        process.kill()
        process.join()
