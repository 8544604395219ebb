"""One of two ranks is killed in any phase of a save, or cannot write: nothing committed is lost, the rest is bit-equal.

Faults T6–T11, T13 and T43. Saves in the background (T12) are in test_async_checkpoint_faults.py.
"""

import signal
from functools import partial

import pytest

from converters.common.names import RUN_LOCK
from converters.store.manifest import check_files
from tests.dist import runs
from tests.dist.pool import Pool
from tests.dist.processes import ranks
from tests.faults.saving import PHASES, is_committed, kill_in
from trainer.checkpoints import io as checkpoint_io

KEYS = {
    "parallelism": {"data_parallel_shard_degree": 2},
    "training": {"local_batch_size": 1},
    "checkpoint": {"interval": 1, "keep_latest_k": 2},
}
ALL_KEPT = KEYS | {"checkpoint": {"interval": 1, "keep_latest_k": 0}}
OFTEN = {("half of the data", 1), ("manifest, no rename", 0)}
CASES = [
    pytest.param(phase, victim, marks=() if (phase, victim) in OFTEN else pytest.mark.slow)
    for phase in PHASES
    for victim in (0, 1)
]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def whole(pool, data, tmp_path_factory):
    """The dump folder of a run that nothing happened to, with all of its steps."""
    dump = tmp_path_factory.mktemp("whole")
    assert pool.run(runs.run, runs.make_config(data, dump, **ALL_KEPT)) == ["", ""]
    return dump


def _names(folder):
    return {path.name for path in folder.iterdir() if path.name != RUN_LOCK}


@pytest.mark.parametrize(("phase", "victim"), CASES)
def test_a_rank_killed_in_a_save(pool, data, whole, tmp_path, phase, victim):
    folder = tmp_path / "checkpoint"
    runs.begin_from(tmp_path, whole, 1, 2)
    config = runs.make_config(data, tmp_path, **KEYS)
    with ranks(config, 2, tmp_path, partial(kill_in, phase, victim, tmp_path, 1)) as running:
        ended = running.wait()
    assert ended[victim].exit_code == -signal.SIGKILL and ended[1 - victim].exit_code == 3
    assert "lost a peer" in ended[1 - victim].output["message"]
    steps = {name for name in _names(folder) if name.startswith("step-")}
    is_purged = (phase, victim) in (("in the purge", 0), ("in the purge", 1), ("committed, before the purge", 1))
    kept = {"step-2"} if is_purged else {"step-1", "step-2"}  # rank 0 purges alone, too
    newest = 3 if is_committed(phase, victim) else 2
    assert steps == kept | {f"step-{newest}"}
    assert all(check_files(folder / step) == [] for step in steps)

    ((error, talk), _) = pool.run(runs.run_and_hear, config)
    assert error == "" and f"resumed from {folder}/step-{newest}\n" in talk
    assert _names(folder) == {"step-3", "step-4"}  # what the kill left is swept
    expected, seen = runs.read_losses(whole), runs.read_losses(tmp_path)
    assert seen == {step: expected[step] for step in (3, 4)}
    for step in ("step-3", "step-4"):
        assert runs.differences(folder / step, whole / "checkpoint" / step) == []
        assert check_files(folder / step) == []


def run_where_the_second_save_fails_on_one_rank(config):
    """Case: rank 1 alone has a full disk, while the second of its saves lasts."""
    writer, num_saves = checkpoint_io.CheckpointWriter, 0
    write_data = writer.write_data

    def fail(self, plan, planner):
        nonlocal num_saves
        num_saves += self._rank == 1
        if num_saves == 2:
            raise OSError(28, "No space left on device")
        return write_data(self, plan, planner)

    writer.write_data = fail
    try:
        return runs.run_and_hear(config)
    finally:
        writer.write_data = write_data


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
def test_a_save_that_one_rank_cannot_write_is_let_pass_by_all(pool, data, whole, tmp_path, mode):
    folder = tmp_path / "checkpoint"
    config = runs.make_config(data, tmp_path, **KEYS | {"checkpoint": KEYS["checkpoint"] | {"async_mode": mode}})
    ((error, talk), (other, _)) = pool.run(run_where_the_second_save_fails_on_one_rank, config)
    assert error == other == "" and "rank 1: OSError: [Errno 28] No space left on device" in talk
    assert "step 1 is complete; failed saves in a row: 1; training continues" in talk
    assert _names(folder) == {"step-3", "step-4"} and runs.read_losses(tmp_path) == runs.read_losses(whole)
    for step in ("step-3", "step-4"):
        assert runs.differences(folder / step, whole / "checkpoint" / step) == []
