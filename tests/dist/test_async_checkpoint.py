"""Checkpoints written in the background: the same bytes, one at a time, and what a slow or a failing disk does."""

import filecmp
import re
import threading

import pytest

from converters.common.names import RUN_LOCK
from converters.store.manifest import check_files
from tests.dist import runs
from tests.uploaded import SLOW_STORES, runs_in_store

FSDP2 = runs.FSDP2


@pytest.fixture(autouse=True, params=SLOW_STORES)
def store(request, monkeypatch):
    runs_in_store(request, monkeypatch)


def _config(data, dump, mode, *, steps=4, interval=2, **checkpoint):
    checkpoint |= {"async_mode": mode, "interval": interval}
    return runs.make_config(data, dump, steps=steps, checkpoint=checkpoint, **FSDP2)


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _differing_files(a, b):
    found = filecmp.dircmp(a, b)
    _, different, odd = filecmp.cmpfiles(a, b, found.common_files, shallow=False)
    return [*different, *odd, *found.left_only, *found.right_only]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_the_files_are_those_of_a_save_that_is_waited_for(pools, data, whole, tmp_path, tmp_path_factory, mode):
    """A save takes longer than the steps until the next: it writes what its step left, not what is there now."""
    case = runs.run_beside_with_numbers_from_outside  # a family's that titan does not have: the process must find it
    (error, talk), other = pools[2].run(case, _config(data, tmp_path, mode), "slow", tmp_path_factory.mktemp("outside"))
    assert (error, other) == ("", ("", ""))
    for step in ("step-2", "step-4"):
        assert _differing_files(tmp_path / "checkpoint" / step, whole / "checkpoint" / step) == []
        assert check_files(tmp_path / "checkpoint" / step) == []
    assert _names(tmp_path / "checkpoint") == [RUN_LOCK, "step-2", "step-4"]
    assert runs.read_losses(tmp_path) == runs.read_losses(whole)
    assert len(re.findall(r"copied to [\d.]+ MiB of host memory", talk)) == 1
    # step 4 was taken while step 2 was being written, and waited for it; the end waited for step 4
    assert "waiting for the save of step 2" in talk
    assert re.search(r"waited \d+\.\d s for the save of step 2\n.*waited \d+\.\d s for the save of step 4", talk, re.S)
    assert talk.index("s for the save of step 2") < talk.index("step-4")


@pytest.mark.parametrize("mode", ["async", pytest.param("async_with_pinned_mem", marks=pytest.mark.slow)])
def test_a_failure_of_one_rank_ends_the_run_on_all_at_the_next_step(pools, data, tmp_path, mode):
    # no other save is due that could tell: without being asked for at each step, this would not end
    rarely = {"interval": 100_000, "enable_first_step_checkpoint": True, "max_failed_saves": 0}
    config = _config(data, tmp_path, mode, steps=100_000, **rarely)
    heard = pools[2].run(runs.run_beside, config, "full")
    assert all(re.match("SaveFailed: .*No space left on device", error, re.S) for error, _ in heard), heard
    assert _names(tmp_path / "checkpoint") == [RUN_LOCK]  # nothing finished, nothing left behind
    assert max(runs.read_losses(tmp_path)) < 100_000 and "saved" not in heard[0][1]


def test_a_writing_process_that_is_killed_is_reported_on_all_ranks(pools, data, tmp_path):
    config = _config(data, tmp_path, "async_with_pinned_mem", steps=200)
    heard = pools[2].run(runs.run_beside, config, "killed")
    assert "the process that writes checkpoints ended (-9) while it wrote step 2" in heard[1][0]
    assert heard[0][0].startswith("CheckpointError: step 2 was not saved")
    assert not list((tmp_path / "checkpoint").glob("step-*"))


def test_a_request_to_stop_waits_for_the_save(pools, data, tmp_path):
    output = pools[2].run(runs.run_until_asked_to_stop, _config(data, tmp_path, "async"))
    assert all(t.startswith("Preempted: stopped on request after step 1, which is saved") for t in output)
    assert check_files(tmp_path / "checkpoint" / "step-1") == []


def test_a_nan_waits_for_the_save_before_and_names_it(pools, data, tmp_path):
    output = pools[2].run(runs.run_into_a_nan, _config(data, tmp_path, "async"))
    assert all(t.startswith("NumericalFault: step 3") and "checkpoint is step 2" in t for t in output)
    assert check_files(tmp_path / "checkpoint" / "step-2") == []


@pytest.mark.slow
def test_a_nan_is_reported_also_where_the_save_before_came_to_nothing(pools, data, tmp_path):
    output = pools[2].run(runs.run_into_a_nan_beside, _config(data, tmp_path, "async"))
    assert all(t.startswith("NumericalFault: step 3") and "there is no earlier checkpoint" in t for t in output)
    assert not list((tmp_path / "checkpoint").glob("step-*"))


@pytest.mark.slow
def test_old_steps_go_only_when_the_new_one_is_there(pools, data, tmp_path):
    """Four saves, two kept: while one is being written there are always two whole ones."""
    config = _config(data, tmp_path, "async", steps=4, interval=1, keep_latest_k=2)
    seen, done = set(), threading.Event()

    def watch():
        while not done.wait(0.005):
            folder = tmp_path / "checkpoint"
            seen.add(tuple(sorted(p.name for p in folder.glob("step-*"))) if folder.is_dir() else ())

    watcher = threading.Thread(target=watch)
    watcher.start()
    heard = pools[2].run(runs.run_beside, config, "slow")
    done.set()
    watcher.join()
    assert [error for error, _ in heard] == ["", ""]
    assert _names(tmp_path / "checkpoint") == [RUN_LOCK, "step-3", "step-4"]
    assert ("step-1", "step-2") in seen and ("step-2", "step-3") in seen
    assert not seen & {("step-2",), ("step-3",), ("step-4",)}


def test_going_on_after_such_a_save_is_bit_equal(pools, data, whole, tmp_path):
    config = _config(data, tmp_path, "async", steps=2)
    assert pools[2].run(runs.run_beside, config) and runs.read_losses(tmp_path).keys() == {1, 2}
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, **FSDP2)) == ["", ""]
    assert _differing_files(tmp_path / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []
