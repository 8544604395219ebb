"""A rank that is killed while its checkpoint is written in the background: T12 and T13, in a thread and a process."""

import time
from functools import partial
from pathlib import Path

import pytest

from converters.common.names import MANIFEST
from converters.store.manifest import check_files
from tests.dist import runs, slow_saver
from tests.dist.processes import ranks

FSDP2 = runs.FSDP2


def _run_whole(config, dump):
    with ranks(config, 2, dump) as running:
        assert [ended.exit_code for ended in running.wait().values()] == [0, 0]


def _get_stuck(how, mode, rank):
    from trainer.checkpoints import background as checkpoint_async

    if mode == "async":
        getattr(slow_saver.Slow, how)()
    else:
        checkpoint_async.PROGRAM = [slow_saver.__file__, how]


def _wait_for(condition, what):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _writers_of(process_ids):
    """The processes that write checkpoints for these ranks: their arguments begin with their rank's process id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"slow_saver.py" in argument for argument in arguments):
            found += [path.parent.name for i in process_ids if str(i).encode() in arguments]
    return found


@pytest.mark.slow  # in the suite: a killed writing process (tests/dist), and a rank in a save that is waited for
@pytest.mark.parametrize(
    ("mode", "how", "victim"),
    [
        ("async_with_pinned_mem", "stuck_in_data", 0),
        ("async", "stuck_in_commit", 1),
        ("async", "stuck_in_data", 0),
        ("async_with_pinned_mem", "stuck_in_commit", 1),
    ],
)
def test_the_step_before_stays_and_the_next_start_is_bit_equal(data, whole, tmp_path, mode, how, victim):
    folder = tmp_path / "checkpoint"
    config = runs.make_config(data, tmp_path, checkpoint={"async_mode": mode, "keep_latest_k": 2}, **FSDP2)

    def is_stuck():
        staged = list(folder.glob(".tmp-*")) if (folder / "step-2").is_dir() else []
        return any((tmp / MANIFEST).exists() if how == "stuck_in_commit" else any(tmp.iterdir()) for tmp in staged)

    with ranks(config, 2, tmp_path, partial(_get_stuck, how, mode)) as running:
        _wait_for(is_stuck, "step 4 is under way")
        process_ids = [process.pid for process in running.processes]
        assert mode == "async" or len(_writers_of(process_ids)) == 2
        time.sleep(0.3)
        running.processes[victim].kill()
        assert running.wait(victim)[victim].exit_code == -9
    _wait_for(lambda: not _writers_of(process_ids), "what writes for a dead rank dies with it")
    assert [p.name for p in folder.glob("step-*")] == ["step-2"] and check_files(folder / "step-2") == []

    _run_whole(runs.make_config(data, tmp_path, **FSDP2), tmp_path)
    assert runs.differences(folder / "step-4", whole / "checkpoint" / "step-4") == []
    assert runs.read_losses(tmp_path) == runs.read_losses(whole)
    assert not list(folder.glob(".tmp-*"))
