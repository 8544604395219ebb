"""Soak (T14): all ranks of a job are killed at random times, again and again; what comes out is bit for bit the same.

`TITAN_SOAK_KILLS=200 python -m pytest -m slow tests/faults/test_soak.py` is the long one; TITAN_SOAK_SEED repeats it.
"""

import os
import random
import signal
import time

import pytest

from converters.common.names import RUN_LOCK
from converters.store.manifest import check_files
from tests.dist import runs
from tests.dist.processes import ranks

KILLS = int(os.environ.get("TITAN_SOAK_KILLS", "10"))
SEED = int(os.environ.get("TITAN_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
STEPS = 8
MODES = ("disabled", "async", "async_with_pinned_mem")


def _config(data, dump, mode):
    return runs.make_config(
        data,
        dump,
        steps=STEPS,
        parallelism={"data_parallel_shard_degree": 2},
        training={"local_batch_size": 1},
        checkpoint={"interval": 1, "keep_latest_k": 2, "async_mode": mode},
    )


def _run_whole(config, dump):
    """Let a job come to its end; how long that takes."""
    started = time.monotonic()
    with ranks(config, 2, dump) as running:
        assert [ended.exit_code for ended in running.wait().values()] == [0, 0]
    return time.monotonic() - started


def _assert_like(dump, whole):
    folder = dump / "checkpoint"
    assert runs.read_losses(dump) == runs.read_losses(whole)
    assert {path.name for path in folder.iterdir()} == {RUN_LOCK, f"step-{STEPS - 1}", f"step-{STEPS}"}
    for step in (STEPS - 1, STEPS):
        name = f"step-{step}"
        assert check_files(folder / name) == [] and runs.differences(folder / name, whole / "checkpoint" / name) == []


@pytest.mark.slow
def test_whatever_the_times_of_the_kills_the_outcome_is_the_same(tmp_path):
    print(f"TITAN_SOAK_SEED={SEED}")  # pytest shows it where this fails
    rng = random.Random(SEED)
    data = runs.make_data(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    secs = _run_whole(_config(data, whole, "disabled"), whole)

    num_kills = num_jobs = num_in_saves = 0
    while num_kills < KILLS:  # a job after the other, each killed until it gets to its end
        dump = tmp_path / f"job-{num_jobs}"
        dump.mkdir()
        config = _config(data, dump, MODES[num_jobs % len(MODES)])
        num_jobs += 1
        is_done, num_starts = False, 0
        while not is_done:
            started, num_starts = time.monotonic(), num_starts + 1
            with ranks(config, 2, dump) as running:
                if num_kills < KILLS:
                    is_done = _killed_at(rng.uniform(0, secs), running)
                else:
                    is_done = [ended.exit_code for ended in running.wait().values()] == [0, 0]
                    assert is_done
            if is_done and num_starts == 1:  # the machine is quieter now than it was
                secs = min(secs, time.monotonic() - started)
            num_kills += not is_done
            num_in_saves += not is_done and any((dump / "checkpoint").glob(".tmp-*"))
        _assert_like(dump, whole)
    print(f"{num_kills} kills, {num_in_saves} of them in a save, in {num_jobs} jobs")


def _killed_at(secs, running):
    """Kill all ranks after so many seconds; True where they were done by then."""
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline and any(process.is_alive() for process in running.processes):
        time.sleep(0.01)
    for process in running.processes:
        process.kill()
    codes = [ended.exit_code for ended in running.wait().values()]
    assert set(codes) <= {0, -signal.SIGKILL, 3}, codes  # 3: one that saw the other's end first
    return codes == [0, 0]
