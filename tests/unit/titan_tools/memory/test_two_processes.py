"""Work in a second process: the same results as in one, the same errors, and nothing left behind."""

import os
import signal
import sys
import time
from multiprocessing import active_children

import pytest

from converters.common.errors import UnsupportedError
from titan_tools.memory import two_processes
from titan_tools.memory.estimate import _two_shares, estimate
from titan_tools.memory.two_processes import run_in_child
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all is done in one process"),
]


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """Also where a test runner has threads of its own."""
    monkeypatch.setattr(two_processes, "_can_fork", lambda: True)


def process_ids():
    yield os.getpid()
    yield os.getpid()


@pytest.fixture
def children():
    """Those of this process, without what a whole run of tests had started before."""
    before = {child.pid for child in active_children()}
    return lambda: [child for child in active_children() if child.pid not in before]


def test_results_come_from_another_process_which_then_ends(children):
    with run_in_child(process_ids) as others:
        ids = list(others)
    assert ids[0] == ids[1] != os.getpid()
    assert not children()


def test_where_no_process_can_be_copied_the_work_is_done_here(monkeypatch):
    monkeypatch.setattr(two_processes, "_can_fork", lambda: False)
    with run_in_child(process_ids) as others:
        assert list(others) == [os.getpid()] * 2


def test_an_error_is_raised_here():
    def fails():
        yield 1
        raise UnsupportedError("not covered", hint="why", tries=["this"])

    with run_in_child(fails) as others:
        assert next(others) == 1
        with pytest.raises(UnsupportedError, match="not covered") as caught:
            next(others)
    assert (caught.value.hint, caught.value.tries) == ("why", ("this",))


def test_what_a_killed_process_had_still_to_do_is_done_here():
    home = os.getpid()

    def killed():
        yield "first"
        if os.getpid() != home:
            os.kill(os.getpid(), signal.SIGKILL)
        yield "second"

    with run_in_child(killed) as others:
        assert list(others) == ["first", "second"]


def test_an_interruption_ends_the_other_process_at_once(children):
    def sleeps():
        time.sleep(60)
        yield

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), run_in_child(sleeps):
        raise KeyboardInterrupt
    assert time.monotonic() - started < 30
    assert not children()


def test_a_killed_process_leaves_none_behind():
    reading, writing = os.pipe()

    def sleeps():
        os.write(writing, b".")
        time.sleep(60)
        yield

    if (killed := os.fork()) == 0:
        with run_in_child(sleeps):
            time.sleep(60)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    started = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert os.read(reading, 1) == b""  # nobody has the pipe open any more
    os.close(reading)
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_pipeline_is_estimated_in_two_processes_as_in_one(monkeypatch):
    words = [
        "--validation.no_enable",
        "--training.seq_len=16",
        "--training.local_batch_size=3",
        "--training.global_batch_size=-1",
    ]
    words += ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"]
    words += [f"--parallelism.{name}_degree=1" for name in ("data_parallel_shard", "tensor_parallel")]
    config = load_config("debug", [*words, "--parallelism.pipeline_parallel_microbatch_size=1"])
    found = []
    for can_fork in (True, False):
        monkeypatch.setattr(two_processes, "_can_fork", lambda can_fork=can_fork: can_fork)
        found.append(estimate(resolve_job(config, 2), gpu=GPUS["h200"], allocator="classic"))
    assert found[0] == found[1]
    assert len(found[0].ranks) == 2


@pytest.mark.parametrize(
    ("kinds", "shares"),
    [
        ([[0]], ([[0]], [])),
        ([[0], [1]], ([[0]], [[1]])),
        ([[0], [1, 2, 3, 4, 5, 6], [7]], ([[0], [7]], [[1, 2, 3, 4, 5, 6]])),
    ],
)
def test_work_is_shared_by_kinds_of_ranks(kinds, shares):
    assert _two_shares(kinds) == shares
