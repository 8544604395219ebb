"""Runs whose checkpoints are in an object store: the same steps as in a folder, whatever its lists show."""

import os

import pytest
import torch.distributed as dist

from converters.common.errors import CheckpointError
from converters.source.open import open_checkpoint
from converters.store.location import Location
from converters.verify import verify
from tests import pretend_store
from tests.dist import runs
from tests.dist.pool import RankFailure
from tests.pretend_store import PretendOutput
from trainer.checkpoints.run_lock import only_run
from trainer.checkpoints.step_folders import list_steps, size_problem, step_folder

FOLDER = Location("pretend://bucket/run/checkpoint")
STEP_2, STEP_4 = (step_folder(FOLDER, step) for step in (2, 4))
FSDP2_TP2 = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
pytestmark = pytest.mark.parametrize("store", ["pretend"], indirect=True)


@pytest.fixture
def begin(pools, data, place, tmp_path, monkeypatch):
    """`begin(…)`: a run that saves to the store; the error of each rank. No list shows anything new, also here."""
    monkeypatch.setenv(pretend_store.LAG, str(pretend_store.FOREVER))

    def begin(*, ranks=2, dump="dump", case=runs.run, sections=runs.FSDP2, steps=4, **checkpoint):
        checkpoint = {"folder": str(FOLDER), **checkpoint}
        config = runs.make_config(data, tmp_path / dump, steps=steps, checkpoint=checkpoint, **sections)
        return pools[ranks].run(runs.in_store, tmp_path / "pretend", case, config)

    return begin


@pytest.mark.parametrize("mode", ["disabled", "async", pytest.param("async_with_pinned_mem", marks=pytest.mark.slow)])
def test_steps_are_those_of_a_folder_and_resumed_bit_for_bit(begin, whole, tmp_path, mode):
    assert begin(async_mode=mode) == ["", ""]
    pretend_store.remove(STEP_4)
    assert begin(async_mode=mode) == ["", ""]
    assert runs.read_losses(tmp_path / "dump") == runs.read_losses(whole)
    assert list_steps(FOLDER) == [4, 2]
    for step in (2, 4):
        assert verify(step_folder(FOLDER, step)).ok
        assert runs.differences(step_folder(FOLDER, step), whole / "checkpoint" / f"step-{step}") == []
    assert not list((tmp_path / "dump").rglob("*.distcp")) and not list((tmp_path / "pretend" / "parts").iterdir())


def test_four_ranks_resume_in_another_layout_and_keep_the_latest(begin, whole, tmp_path):
    sections = {"parallelism": FSDP2_TP2, "training": {"local_batch_size": 1}}
    assert begin() == ["", ""]
    assert begin(ranks=4, sections=sections, steps=6, keep_latest_k=2) == [""] * 4
    assert list_steps(FOLDER) == [6, 4] and not any(size_problem(step_folder(FOLDER, step)) for step in (6, 4))
    with pytest.raises(CheckpointError, match="step-2: no such object"):
        open_checkpoint(STEP_2)
    assert begin(dump="other", load_step=4, load_only=True, steps=6) == ["", ""]
    expected, losses = runs.read_losses(tmp_path / "dump"), runs.read_losses(tmp_path / "other")
    assert losses.keys() == {5, 6} and all(abs(losses[step] - expected[step]) <= 5e-6 for step in losses)


def test_another_run_starts_from_the_whole_state(begin, whole, tmp_path):
    assert begin(steps=2) == ["", ""]
    folder = {"folder": "checkpoint", "initial_load_path": str(STEP_2), "initial_load_model_only": False}
    assert begin(dump="other", **folder) == ["", ""]
    assert runs.differences(tmp_path / "other/checkpoint/step-4", whole / "checkpoint/step-4") == []


def test_a_second_run_is_refused_and_names_the_first(begin):
    with only_run(FOLDER):
        for error in begin():
            assert f"another run saves to {FOLDER}: process {os.getpid()} on " in error
    assert list_steps(FOLDER) == []


def run_and_die(config) -> str:
    """Case: rank 0 is killed when it is about to commit step 4."""
    commit = PretendOutput.commit

    def die(output, **how):
        if output._location == STEP_4:
            os._exit(9)
        commit(output, **how)

    PretendOutput.commit = die
    assert dist.get_world_size() == 2
    return runs.run(config)


def test_a_rank_that_is_killed_before_the_commit_leaves_no_whole_step(begin, whole, tmp_path):
    with pytest.raises(RankFailure):
        begin(case=run_and_die)
    assert list_steps(FOLDER) == [4, 2] and size_problem(STEP_4) == "it has no .metadata"
    with pytest.raises(CheckpointError):
        open_checkpoint(STEP_4)
    assert begin() == ["", ""]
    assert runs.differences(STEP_4, whole / "checkpoint/step-4") == [] and verify(STEP_4).ok


def test_a_folder_of_other_files_is_no_place_for_a_run(begin):
    pretend_store.Objects().put_bytes("bucket/run/checkpoint/notes.txt", b"")
    pretend_store.Objects().catch_up("bucket/run/checkpoint/notes.txt")
    assert all("holds no checkpoint of a run, but other files:\n  notes.txt" in error for error in begin())
