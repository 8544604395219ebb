"""Which folders are steps, which look whole, and which are let go."""

import shutil

import pytest

from converters.common.errors import CheckpointError
from converters.common.names import RUN_LOCK
from converters.store.folder_output import FolderOutput
from converters.store.output import write_manifest
from trainer.checkpoints.step_folders import list_steps, refuse_foreign, retire, size_problem, step_folder, sweep


def _make_step(folder, step):
    path = step_folder(folder, step)
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"m" * 10)
    (path / "__0_0.distcp").write_bytes(b"d" * 100)
    write_manifest(FolderOutput(path), tensors={})
    return path


def test_only_folders_of_exactly_that_name_are_steps(tmp_path):
    for step in (9, 10, 100):
        _make_step(tmp_path, step)
    for name in ("old-step-9-bak", "step-x", "step-", "step-07", ".tmp-abc", "Step-3", "step-5.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-7").write_text("a file")
    (tmp_path / "step-8").symlink_to(tmp_path / "step-9")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert list_steps(tmp_path) == [100, 10, 9]
    assert list_steps(tmp_path / "absent") == []


def test_a_folder_of_other_things_is_refused(tmp_path):
    refuse_foreign(tmp_path / "absent")
    refuse_foreign(tmp_path)  # empty: a run that was killed before its first checkpoint
    (tmp_path / ".tmp-abc").mkdir()
    (tmp_path / RUN_LOCK).touch()
    refuse_foreign(tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / ".old-thesis").mkdir()
    with pytest.raises(CheckpointError, match=r"\.old-thesis\n.*model.safetensors"):
        refuse_foreign(tmp_path)
    _make_step(tmp_path, 1)
    refuse_foreign(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        refuse_foreign(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda p: (p / ".metadata").unlink(), "no .metadata"),
        (lambda p: (p / "titan_manifest.json").unlink(), "no titan_manifest.json"),
        (lambda p: (p / "titan_manifest.json").write_text("{"), "manifest"),
        (lambda p: (p / "__0_0.distcp").write_bytes(b""), "0 bytes instead of 100"),
        (lambda p: (p / "__0_0.distcp").unlink(), "missing"),
    ],
)
def test_sizes_tell_what_is_not_whole(tmp_path, damage, problem):
    path = _make_step(tmp_path, 1)
    assert size_problem(path) == ""
    damage(path)
    assert problem in size_problem(path)


def test_the_oldest_go_and_a_damaged_one_never_costs_a_whole_one(tmp_path):
    for step in (1, 2, 3, 4, 5):
        _make_step(tmp_path, step)
    (tmp_path / "step-5" / "__0_0.distcp").write_bytes(b"")  # cut off
    _make_step(tmp_path, 6)
    assert retire(tmp_path, keep=3, newest=6, damaged={4}) == [1]  # 4 has a flipped bit, as a check has found
    assert list_steps(tmp_path) == [6, 5, 4, 3, 2]
    assert retire(tmp_path, keep=3, newest=6, damaged={4}) == []


def test_after_going_back_the_step_just_saved_stays_and_later_ones_are_not_touched(tmp_path):
    for step in (2, 4, 6, 8):
        _make_step(tmp_path, step)
    assert retire(tmp_path, keep=2, newest=4) == []
    assert retire(tmp_path, keep=1, newest=4) == [2]
    assert list_steps(tmp_path) == [8, 6, 4]


def test_a_removal_that_is_cut_off_leaves_no_half_step(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        _make_step(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        retire(tmp_path, keep=2, newest=3)
    monkeypatch.undo()
    assert list_steps(tmp_path) == [3, 2]
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_sweeping_brings_back_a_step_that_was_being_replaced(tmp_path):
    _make_step(tmp_path, 1).rename(tmp_path / ".old-step-1")
    (tmp_path / ".tmp-new").mkdir()
    refuse_foreign(tmp_path)  # it is the only step of this run, and no stranger
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert size_problem(tmp_path / "step-1") == ""
