"""Our DCP reader and writer against stock DCP, and what they refuse. One process; tests/dist has many ranks."""

import fcntl
import io
import os
import pickle
import warnings
import zipfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from converters.common.errors import CheckpointError
from converters.engine.read import CatalogReader
from converters.families.llama3 import FLAVORS
from converters.model.model_info import ModelInfo, read_model_info
from converters.source.open import open_checkpoint
from converters.store.base import names_at
from converters.store.location import locate
from converters.store.manifest import check_files, read_manifest
from converters.store.output import SummedFile
from trainer.checkpoints import io as checkpoint_io
from trainer.checkpoints.fit import refuse_misfits
from trainer.checkpoints.io import PlainPlanner, SourceReader
from trainer.checkpoints.run_lock import only_run
from trainer.checkpoints.shared_folder import require_shared
from trainer.checkpoints.step_folders import list_steps, refuse_foreign, retire, size_problem, step_folder, sweep
from trainer.checkpoints.write import write_step
from trainer.ranks.agree import on_each, on_first

INFO = ModelInfo("llama3", FLAVORS["debug_gqa"])


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('pg')}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _state():
    torch.manual_seed(3)
    return {
        "a.weight": torch.randn(6, 5),
        "b.weight": torch.randn(4, 3).to(torch.bfloat16),
        "rows.weight": torch.randn(7, 2).t(),  # not contiguous
        "empty": torch.zeros(0, 3),
        "optimizer": {"state.a.weight.step": torch.tensor(4.0), "param_groups.a.weight.betas": (0.9, 0.95)},
        "train_state": {"step": 4, "ntokens_seen": 1 << 40},
        "dataloader": {"fingerprint": "ä/train/64", "seed": None},
        "rng": {"cpu.0": torch.arange(16, dtype=torch.uint8)},
    }


def _flat(state):
    flat = {}
    for key, value in state.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _blank(state):
    return {
        k: _blank(v) if isinstance(v, dict) else torch.zeros_like(v) if torch.is_tensor(v) else 0
        for k, v in state.items()
    }


def _assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if torch.is_tensor(value):
            assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key
        else:
            assert ours[key] == value, key


def _load_ours(folder, wanted, group):
    catalog = open_checkpoint(folder)
    with CatalogReader(catalog) as reader:
        storage = SourceReader(reader, values=catalog.values, read_blob=reader.read_blob)
        dcp.load(wanted, storage_reader=storage, planner=PlainPlanner(), process_group=group)
    return wanted


@pytest.mark.parametrize("item_bytes", [256 << 20, 40])
def test_stock_dcp_reads_what_we_write(tmp_path, group, monkeypatch, item_bytes):
    monkeypatch.setattr(checkpoint_io, "_MAX_ITEM_BYTES", item_bytes)
    write_step(tmp_path / "step-4", _state(), info=INFO, group=group)
    loaded = _blank(_state())
    dcp.load(loaded, checkpoint_id=str(tmp_path / "step-4"), process_group=group)
    _assert_equal(_flat(loaded), _flat(_state()))
    chunks = open_checkpoint(tmp_path / "step-4").tensors["a.weight"].chunks
    assert [c.box.sizes for c in chunks] == ([(6, 5)] if item_bytes > 40 else [(2, 5)] * 3)


@pytest.mark.parametrize("store", ["folder", "pretend"], indirect=True)
def test_we_read_what_we_write_and_the_manifest_agrees(place, group):
    folder = place / "step-4"
    write_step(folder, _state(), info=INFO, group=group)
    _assert_equal(_load_ours(folder, _blank(_flat(_state())), group), _flat(_state()))
    catalog = open_checkpoint(folder)
    assert check_files(catalog.store) == []
    tensors = {key for key, value in _flat(_state()).items() if torch.is_tensor(value)}
    assert set(read_manifest(catalog.root).tensors) == tensors
    assert read_model_info(catalog.root).args == INFO.args
    assert names_at(locate(place)) == ["step-4/"]


@pytest.mark.parametrize("store", ["folder", "pretend"], indirect=True)
def test_steps_are_listed_replaced_and_retired_in_any_store(place, group, monkeypatch):
    for step in (1, 2, 10, 10):
        write_step(step_folder(place, step), {"a": torch.full((2,), step)}, info=INFO, group=group)
    assert list_steps(place) == [10, 2, 1] and not any(size_problem(step_folder(place, s)) for s in (1, 2, 10))
    monkeypatch.setattr("trainer.checkpoints.write.write_manifest", _disk_full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_step(step_folder(place, 11), {"a": torch.zeros(2)}, info=INFO, group=group)
    assert list_steps(place) == [10, 2, 1]
    assert retire(place, keep=2, newest=10) == [1] and list_steps(place) == [10, 2]
    sweep(place)
    with only_run(place):
        refuse_foreign(place)
        require_shared(place, group)
    assert list_steps(place) == [10, 2]
    assert _load_ours(step_folder(place, 10), {"a": torch.zeros(2, dtype=torch.int64)}, group)["a"].tolist() == [10, 10]


def _disk_full(*args, **keys):
    raise OSError(28, "No space left on device")


def test_every_file_of_a_step_is_synced_by_the_rank_that_wrote_it(tmp_path, group, monkeypatch):
    """Rank 0 syncs the folder before the rename, but data of other machines is in their own caches."""
    synced, fsync = set(), os.fsync

    def record(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_step(tmp_path / "step-4", _state(), info=INFO, group=group)
    written = {file.name for file in (tmp_path / "step-4").iterdir() if file.suffix in (".distcp", ".metadata")}
    assert written | {".metadata"} <= synced


def test_every_item_carries_its_true_crc32(tmp_path, group):
    write_step(tmp_path / "step-4", _state(), info=INFO, group=group)
    catalog = open_checkpoint(tmp_path / "step-4")
    items = [(c.file, *c.item) for t in catalog.tensors.values() for c in t.chunks]
    items += [(i.file, i.byte_offset, i.length) for i in catalog.items.values()]
    assert len(items) == len(_flat(_state()))
    for file, offset, length in items:
        data = (tmp_path / "step-4" / file).read_bytes()[offset : offset + length]
        with zipfile.ZipFile(io.BytesIO(data)) as item:
            assert item.testzip() is None
            assert all(record.CRC for record in item.infolist() if record.file_size)


@pytest.mark.parametrize("block_bytes", [64 << 20, 8])
def test_we_read_what_stock_dcp_writes(tmp_path, group, monkeypatch, block_bytes):
    monkeypatch.setattr(checkpoint_io, "_READ_BLOCK_BYTES", block_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(), checkpoint_id=str(tmp_path / "stock"), process_group=group)
    _assert_equal(_load_ours(tmp_path / "stock", _blank(_flat(_state())), group), _flat(_state()))


class _Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_value_that_is_not_plain_is_refused_and_not_run(tmp_path, group):
    state = {"a": torch.ones(2), "train_state": {"step": _Trap(str(tmp_path / "sprung"))}}
    dcp.save(state, checkpoint_id=str(tmp_path / "bad"), process_group=group)
    with pytest.raises(CheckpointException) as failure:
        _load_ours(tmp_path / "bad", {"train_state.step": 0}, group)
    assert isinstance(checkpoint_io.as_titan_error("load", failure.value), CheckpointError)
    assert not (tmp_path / "sprung").exists()


def test_metadata_is_not_unpickled(tmp_path, group):
    write_step(tmp_path / "step-1", {"a": torch.ones(2)}, info=INFO, group=group)
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(_Trap(str(tmp_path / "sprung"))))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "step-1")
    assert not (tmp_path / "sprung").exists()


def test_all_misfits_are_reported_at_once(tmp_path, group):
    write_step(tmp_path / "step-1", _state(), info=INFO, group=group)
    catalog = open_checkpoint(tmp_path / "step-1")
    wanted = {
        "a.weight": torch.zeros(6, 4),
        "b.weight": torch.zeros(4, 3),
        "rows.weight": torch.zeros(2, 7),
        "new.weight": torch.zeros(1),
        "lr_scheduler.last_epoch": 0,
        "train_state.steps": 0,
    }
    with pytest.raises(CheckpointError) as failure:
        refuse_misfits(wanted, catalog.tensors, catalog.values, group=group, path=tmp_path, may_cast=False)
    output = failure.value.message
    assert "(2 missing, 1 unexpected, 1 of another shape, 1 of another dtype, 1 sections missing)" in output
    assert "a.weight: shape [6, 5] in the checkpoint, [6, 4] in the model" in output
    assert "b.weight: dtype bfloat16 in the checkpoint, float32 in the model" in output
    assert "new.weight: missing" in output and "train_state.steps: missing" in output
    assert "lr_scheduler: the checkpoint has no such section" in output
    assert "empty: the model has no such tensor" in output
    assert "rows.weight" not in output and "optimizer" not in output and "rng" not in output

    with pytest.raises(CheckpointError) as failure:
        refuse_misfits(wanted, catalog.tensors, catalog.values, group=group, path=tmp_path, may_cast=True)
    assert "b.weight" not in failure.value.message


def test_a_failed_save_leaves_nothing_and_the_old_step_whole(tmp_path, group, monkeypatch):
    folder = tmp_path / "step-1"
    write_step(folder, {"a": torch.ones(2)}, info=INFO, group=group)

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummedFile, "write", disk_full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_step(folder, {"a": torch.zeros(2)}, info=INFO, group=group)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert _load_ours(folder, {"a": torch.zeros(2)}, group)["a"].tolist() == [1, 1]


def test_an_error_of_a_rank_is_everyones(group):
    assert on_each(group, lambda: 7) == [7]
    assert on_first(group, lambda: "x") == "x"
    with pytest.raises(CheckpointError, match="rank 0: .*Permission denied"):
        on_each(group, lambda: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
