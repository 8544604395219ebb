"""What is read of the run that wrote a checkpoint; stock DCP writes the folders."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.common.errors import CheckpointError
from trainer.checkpoints.recorded import first_recorded, read_recorded

GROUP = {"decoupled_weight_decay": True, "initial_lr": 2e-3, "lr": 1e-5, "eps": 1e-6, "weight_decay": 0.2}
OF_GROUP = {
    "optimizer.name": "AdamW",
    "optimizer.lr": 2e-3,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.2,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.9,
}


def save(folder, *, train_state, dataloader=None, group=GROUP):
    settings = {f"param_groups.layers.0.ffn_norm.weight.{key}": value for key, value in group.items()}
    settings["param_groups.layers.0.ffn_norm.weight.betas"] = (0.8, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group here
        state = {"train_state": train_state, "dataloader": dataloader or {}, "optimizer": settings, "w": torch.ones(2)}
        dcp.save(state, checkpoint_id=str(folder))
    return folder


def index(consumed, seq_len=64):
    return {"fingerprint": f"abc/{seq_len}", "consumed_samples": consumed, "seed": 0, "version": 1}


def test_what_is_recorded_counts(tmp_path):
    settings = {"training.global_batch_size": 8, "training.dataset_streams": 64, "optimizer.name": "Adam"}
    state = {"step": 5, "settings": json.dumps(settings)}
    path = save(tmp_path / "a", train_state=state, dataloader=index(10))
    found = read_recorded(path, units_per_sample=64)
    assert (found.settings, found.is_partial) == (settings, False)
    anew = read_recorded(path, excluded=("dataloader",), units_per_sample=64)
    assert anew.settings == {key: value for key, value in settings.items() if key != "training.dataset_streams"}
    new_run = read_recorded(path, excluded=("train_state",), units_per_sample=64)
    assert (new_run.settings, new_run.left_batch) == (OF_GROUP, 8)  # its batch is free


def test_progress_that_is_not_loaded_may_be_damaged(tmp_path):
    path = save(tmp_path / "a", train_state={"step": 5, "settings": "{"}, dataloader=index(10))
    assert read_recorded(path, excluded=("train_state",), units_per_sample=64).left_batch is None
    with pytest.raises(CheckpointError, match="settings is damaged"):
        read_recorded(path, units_per_sample=64)


@pytest.mark.parametrize(
    ("train_state", "consumed", "batch"),
    [
        ({"step": 100, "ntokens_seen": 800 * 64}, 800, 8),
        ({"step": torch.tensor(100), "ntokens_seen": torch.tensor(700 * 64)}, 800, 8),  # stock DCP's; some padding
        ({"step": 100, "ntokens_seen": 800 * 64}, 400, None),  # the data was started again
        ({"step": 100, "ntokens_seen": 650 * 64}, 650, None),  # with several sizes
        ({"step": 100}, 800, None),
        ({"step": 0, "ntokens_seen": 0}, 0, None),
    ],
)
def test_an_earlier_checkpoints_batch_follows_from_its_samples(tmp_path, train_state, consumed, batch):
    found = read_recorded(save(tmp_path / "a", train_state=train_state, dataloader=index(consumed)), units_per_sample=7)
    assert found.is_partial
    left = read_recorded(tmp_path / "a", excluded=("train_state",), units_per_sample=7)
    assert left.left_batch == batch
    assert found.settings == OF_GROUP | ({} if batch is None else {"training.global_batch_size": batch})


def test_an_earlier_checkpoints_streams_are_those_of_its_position(tmp_path):
    positions = [[0, 0, 1, 2, 50], [0, 0, 3, 4, 30]]
    loader = {"fingerprint": "abc/2 streams", "positions": positions, "seed": 0, "version": 1}
    path = save(tmp_path / "a", train_state={"step": 10, "ntokens_seen": 80 * 64}, dataloader=loader)
    of_data = {"training.global_batch_size": 8, "training.dataset_streams": 2}
    assert read_recorded(path, units_per_sample=64).settings == OF_GROUP | of_data


def test_torchtitans_adam_is_told_from_adamw(tmp_path):
    path = save(tmp_path / "a", train_state={"step": 1}, group=GROUP | {"decoupled_weight_decay": False})
    assert read_recorded(path, units_per_sample=64).settings["optimizer.name"] == "Adam"
    older = {key: value for key, value in GROUP.items() if key != "decoupled_weight_decay"}
    path = save(tmp_path / "b", train_state={"step": 1}, group=older)
    assert "optimizer.name" not in read_recorded(path, units_per_sample=64).settings


def test_checkpoints_that_cannot_be_read_are_passed_over(tmp_path):
    damaged = save(tmp_path / "damaged", train_state={"step": 9, "settings": "{"})
    good = save(tmp_path / "good", train_state={"step": 8})
    (tmp_path / "nothing").mkdir()
    paths = [tmp_path / "nothing", damaged, good]
    found = first_recorded(paths, excluded=(), units_per_sample=64)
    assert found and found.path == good
    assert first_recorded(paths[:2], excluded=(), units_per_sample=64) is None
