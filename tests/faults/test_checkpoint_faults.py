"""Checkpoints that are damaged, lie among junk, do not fit, or cannot be written: faults T38–T43, T46, T52, T53, T55.

One rank, in this process, where that is enough; T44 and T49 are in tests/dist, T47 in tests/unit.
"""

import json
import re
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.common.names import DCP_METADATA, MANIFEST, RUN_LOCK
from converters.engine.read import CatalogReader
from converters.families.llama3 import FLAVORS
from converters.model.model_info import ModelInfo
from converters.source.open import open_checkpoint
from converters.store.folder_output import FolderOutput
from converters.store.location import locate
from converters.store.manifest import check_files
from tests.dist import runs
from trainer.checkpoints import io as checkpoint_io
from trainer.checkpoints import load as checkpoint_load
from trainer.checkpoints import write as checkpoint_write
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.run_lock import only_run
from trainer.config.sections import Checkpoint

INFO = ModelInfo("llama3", runs.TWO_LAYERS)
DATA, BLOBS, MODEL = "__0_0.distcp", "__0_1.distcp", "titan_model.json"


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('pg')}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def whole(group, data, tmp_path_factory):
    """The dump folder of a run that nothing happened to, with each of its four steps."""
    dump = tmp_path_factory.mktemp("whole")
    assert runs.run(_config(data, dump)) == ""
    return dump


def _config(data, dump, **checkpoint):
    return runs.make_config(data, dump, checkpoint={"interval": 1, "keep_latest_k": 0} | checkpoint)


def _assert_ends_like(whole, dump, *, steps):
    expected = runs.read_losses(whole)
    assert runs.read_losses(dump) == {step: expected[step] for step in steps}
    last = dump / "checkpoint" / "step-4"
    assert runs.differences(last, whole / "checkpoint" / "step-4") == [] and check_files(last) == []


def _names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != RUN_LOCK)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def _hole(path):
    content = bytearray(path.read_bytes())
    content[8192:12288] = bytes(4096)
    path.write_bytes(content)


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])


def _empty(path):
    path.write_bytes(b"")


def _garbage(path):
    path.write_bytes(b"\x80\x02}q\x00" * (path.stat().st_size // 5) + b"x" * (path.stat().st_size % 5))


DAMAGE = [
    (DATA, _flip, "its bytes have changed"),
    (DATA, _hole, "its bytes have changed"),
    (DATA, _cut, "bytes instead of"),
    (DATA, _empty, "0 bytes instead of"),
    (DATA, Path.unlink, "missing"),
    (BLOBS, _flip, "its bytes have changed"),
    (DCP_METADATA, _flip, "its bytes have changed"),
    (DCP_METADATA, _cut, "bytes instead of"),
    (DCP_METADATA, _empty, "0 bytes instead of"),
    (DCP_METADATA, Path.unlink, "it has no .metadata"),
    (DCP_METADATA, _garbage, "its bytes have changed"),
    (MODEL, _flip, "its bytes have changed"),
    (MANIFEST, _flip, MANIFEST),
    (MANIFEST, _cut, "is not JSON"),
    (MANIFEST, _empty, "is not JSON"),
    (MANIFEST, Path.unlink, f"it has no {MANIFEST}"),
]


@pytest.mark.parametrize(("file", "damage", "output"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_newest_step_is_found_before_a_weight_is_changed(
    group, data, whole, tmp_path, monkeypatch, capsys, file, damage, output
):
    """Also where there is no memory for a copy, so that files are read once to be verified and once to be loaded."""
    runs.begin_from(tmp_path, whole, 2, 3)
    folder = tmp_path / "checkpoint"
    damage(folder / "step-3" / file)
    state, _ = runs._run_state(_config(data, tmp_path), runs._ranks())
    for available in (1 << 40, 0):
        monkeypatch.setattr(checkpoint_load, "available_bytes", lambda available=available: available)
        state.model.initialize(0)
        before = {fqn: tensor.clone() for fqn, tensor in state.model.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used:\n  step-3: .*") as failure:
            # asked for by its number: no other
            Checkpoints(locate(folder), Checkpoint(load_step=3), INFO, group=group).resume(state)
        assert output in failure.value.message
        assert all(torch.equal(tensor, before[fqn]) for fqn, tensor in state.model.state_dict().items())
        capsys.readouterr()
        checkpoints = Checkpoints(locate(folder), Checkpoint(), INFO, group=group)
        assert checkpoints.resume(state) == locate(folder / "step-2") and checkpoints.last_good_step == 2
        heard = capsys.readouterr().err
        found = f"WARNING: {folder}/step-3 is damaged and will not be used:"
        assert found in heard and output in heard and ("is read twice" in heard) == (not available)
        with CatalogReader(open_checkpoint(folder / "step-2")) as reader:
            for fqn, tensor in state.model.state_dict().items():
                assert (reader.read(fqn, Box.whole(tuple(tensor.shape))) == tensor.numpy()).all()


def test_among_other_files_only_steps_are_read_and_the_run_resumes_bit_equal(group, data, whole, tmp_path):
    runs.begin_from(tmp_path, whole, 1, 2)
    folder = tmp_path / "checkpoint"
    _hole(folder / "step-2" / DATA)
    for name in ("step-x", "old-step-9-bak", "step-07", "step-9.old", ".tmp-killed"):
        shutil.copytree(folder / "step-1", folder / name)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "step-8").symlink_to(folder / "step-1")
    (folder / "step-7").write_text("a file")
    junk = {"step-x", "old-step-9-bak", "step-07", "step-9.old", "loop", "step-8", "step-7"}
    error, heard = runs.run_and_hear(_config(data, tmp_path, keep_latest_k=2))
    assert error == "" and f"{folder}/step-2 is damaged" in heard and f"resumed from {folder}/step-1\n" in heard
    _assert_ends_like(whole, tmp_path, steps=(2, 3, 4))
    assert set(_names(folder)) == junk | {"step-3", "step-4"}


def test_nothing_but_damaged_steps_is_no_fresh_start(group, data, whole, tmp_path):
    runs.begin_from(tmp_path, whole, 1, 2, 3)
    folder = tmp_path / "checkpoint"
    _flip(folder / "step-3" / DATA)
    (folder / "step-2" / MANIFEST).unlink()
    _empty(folder / "step-1" / DCP_METADATA)
    error = runs.run(_config(data, tmp_path))
    assert re.search(r"can be used:\n  step-3: .*changed.*\n  step-2: it has no .*\n  step-1: ", error), error
    assert "nothing was loaded" in error and CheckpointError.exit_code == 2
    assert _names(folder) == ["step-1", "step-2", "step-3"] and not (tmp_path / "metrics.jsonl").exists()


@contextmanager
def _full_in(saves):
    """In these saves, by number, the system refuses files of more than 100 kB, as a full disk refuses all."""
    write_data, soft_limit = checkpoint_io.CheckpointWriter.write_data, resource.getrlimit(resource.RLIMIT_FSIZE)
    num_saves = 0

    def limited(self, plan, planner):
        nonlocal num_saves
        num_saves += 1
        if num_saves not in saves:
            return write_data(self, plan, planner)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, soft_limit[1]))
        try:
            return write_data(self, plan, planner)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, soft_limit)

    checkpoint_io.CheckpointWriter.write_data = limited
    try:
        yield
    finally:
        checkpoint_io.CheckpointWriter.write_data = write_data


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("at_most", "saves"), [pytest.param(1, (1, 3), marks=pytest.mark.slow), (2, (2, 3))])
def test_a_disk_that_is_full_for_a_while_is_reported_and_training_continues(
    group, data, whole, tmp_path, mode, at_most, saves
):
    with _full_in(saves):
        config = _config(data, tmp_path, async_mode=mode, max_failed_saves=at_most)
        error, heard = runs.run_and_hear(config)
    assert error == "" and heard.count("WARNING: a checkpoint was NOT saved:") == 2
    assert len(re.findall(r"File too large", heard)) >= 2
    assert len(re.findall(r"a checkpoint needs [\d.]+ MiB, [\d.]+ \w+ are free on that disk; ", heard)) == 2
    assert "step 1 is complete" in heard if 1 not in saves else "there is no checkpoint yet" in heard
    assert _names(tmp_path / "checkpoint") == [f"step-{step}" for step in range(1, 5) if step not in saves]
    _assert_ends_like(whole, tmp_path, steps=(1, 2, 3, 4))


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("at_most", "saves", "left", "output"),
    [
        (1, (2, 3), ["step-1"], "failed saves in a row: 2; a checkpoint needs"),
        (0, (3,), ["step-1", "step-2"], "failed saves in a row: 1; a checkpoint needs"),
        (9, (4,), ["step-1", "step-2", "step-3"], "the end of the run was not saved; a checkpoint needs"),
    ],
)
def test_one_failure_too_many_ends_the_run_and_what_was_saved_stays(
    group, data, tmp_path, mode, at_most, saves, left, output
):
    with _full_in(saves):
        error = runs.run(_config(data, tmp_path, async_mode=mode, max_failed_saves=at_most))
    assert "File too large" in error and output in error and f"step {left[-1][-1]} is complete" in error, error
    folder = tmp_path / "checkpoint"
    assert _names(folder) == left and all(check_files(folder / name) == [] for name in left)


@pytest.mark.parametrize("when", [pytest.param("before a save", marks=pytest.mark.slow), "in a save"])
def test_a_folder_that_disappears_is_created_again_and_locked(group, data, whole, tmp_path, monkeypatch, when):
    """The state in memory is the only one then. Where nothing can be made there, it is a save that failed."""
    folder, commit, room = tmp_path / "checkpoint", FolderOutput.commit, Checkpoints.require_room
    num_calls, locked = 0, []

    def vanish_at_third():
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            shutil.rmtree(folder)

    if when == "in a save":
        monkeypatch.setattr(FolderOutput, "commit", lambda *a, **k: (vanish_at_third(), commit(*a, **k)))
    else:
        have_folder = Checkpoints._have_folder
        monkeypatch.setattr(Checkpoints, "_have_folder", lambda *a, **k: (vanish_at_third(), have_folder(*a, **k)))

    def require_room(*args, **keys):
        room(*args, **keys)
        try:
            with only_run(folder, patience_secs=0):
                locked.append(False)
        except CheckpointError:
            locked.append(True)

    monkeypatch.setattr(Checkpoints, "require_room", require_room)
    error, heard = runs.run_and_hear(_config(data, tmp_path))
    assert error == "" and heard.count(f"WARNING: {folder} was REMOVED") == 1
    assert _names(folder) == (["step-4"] if when == "in a save" else ["step-3", "step-4"])
    assert len(locked) == 5 and all(locked)
    _assert_ends_like(whole, tmp_path, steps=(1, 2, 3, 4))


@pytest.mark.parametrize("says_model", [True, False])
def test_a_checkpoint_of_another_model_is_reported_as_a_table(group, data, whole, tmp_path, monkeypatch, says_model):
    other = replace(FLAVORS["debug_gqa"], num_layers=1, vocab_size=2056)
    monkeypatch.setitem(FLAVORS, "debug_other", other)
    runs.begin_from(tmp_path, whole, 2)
    if not says_model:  # as torchtitan's
        path = tmp_path / "initial"
        shutil.move(tmp_path / "checkpoint" / "step-2", path)
        for name in (MODEL, MANIFEST):
            (path / name).unlink()
    keys = {} if says_model else {"initial_load_path": str(path), "initial_load_model_only": False}
    config = runs.make_config(data, tmp_path, flavor="debug_other", checkpoint=keys)
    error = runs.run(config)
    if says_model:
        assert re.search(r"num_layers: 2 in the checkpoint, 1 in the config", error), error
        assert "vocab_size: 2048 in the checkpoint, 2056 in the config" in error
    else:
        assert "the tensors do not match the model, 11 problems:" in error, error
        assert "\n  unexpected  layers.1.attention.wq.weight\n" in error
        assert "\n  shape       tok_embeddings.weight  is [2048, 128], should be [2056, 128]\n" in error
    assert not (tmp_path / "metrics.jsonl").exists()


def _as_version(step, version):
    """Rewrite a step's manifest as titan's first version did, over canonical JSON, or as a later one would."""
    content = json.loads((step / MANIFEST).read_bytes())
    del content["crc32"]
    content["version"] = version
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    (step / MANIFEST).write_text(json.dumps(content | {"crc32": crc32(canonical)}))


def test_a_step_of_an_older_titan_is_resumed_and_of_a_newer_one_reported(group, data, whole, tmp_path):
    runs.begin_from(tmp_path, whole, 3)
    _as_version(tmp_path / "checkpoint" / "step-3", 1)
    assert runs.run(_config(data, tmp_path / "newer")) == ""
    assert runs.run(_config(data, tmp_path)) == ""
    _assert_ends_like(whole, tmp_path, steps=(4,))
    for step in (3, 4):
        _as_version(tmp_path / "checkpoint" / f"step-{step}", 3)
    error = runs.run(_config(data, tmp_path))
    assert error.count(f"{MANIFEST}: version 3; this titan knows version 2") == 2, error


def test_the_purge_spares_whole_steps_where_newer_ones_are_damaged_or_unfinished(
    group, data, whole, tmp_path, monkeypatch
):
    runs.begin_from(tmp_path, whole, 1, 2, 3, 4)
    folder, retire, seen = tmp_path / "checkpoint", checkpoint_write.retire, []
    _flip(folder / "step-3" / DATA)  # found by its CRC32
    (folder / "step-4" / MANIFEST).unlink()  # unfinished, as other tools leave it

    def watch(*args, **keys):
        removed = retire(*args, **keys)
        seen.append([s.name for s in sorted(folder.glob("step-*")) if (s / MANIFEST).exists() and not check_files(s)])
        return removed

    monkeypatch.setattr(checkpoint_write, "retire", watch)
    assert runs.run(_config(data, tmp_path, keep_latest_k=2)) == ""
    assert seen == [["step-2", "step-3"], ["step-3", "step-4"]]
    _assert_ends_like(whole, tmp_path, steps=(3, 4))
