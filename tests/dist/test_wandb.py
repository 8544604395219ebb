"""A run that logs to Weights & Biases offline: its id is in the checkpoint, and a resumed run continues it."""

import io
import os

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from converters.verify import verify
from tests.dist import runs
from tests.doors import reshard

pytest.importorskip("wandb")
pytestmark = pytest.mark.slow  # in one process: tests/unit/trainer/observability/test_wandb_sink.py
RUN_ID = "train_state.wandb_run_id"


def run_offline(config) -> tuple[str, str]:
    """Case: a run with wandb offline; the error it ends with, if any, and what it printed."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_RUN_NAME": "a name"}
    try:
        return runs.run_and_hear(config)
    finally:
        import wandb

        wandb.teardown()


def saved_id(step) -> str | None:
    catalog = open_checkpoint(step)
    if RUN_ID not in catalog.values:
        return None
    with CatalogReader(catalog) as reader:
        return torch.load(io.BytesIO(reader.read_blob(RUN_ID)), weights_only=True)


def logged_ids(dump) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in dump.glob("wandb/offline-run-*"))


def test_a_resumed_run_continues_its_run(pools, tmp_path):
    data = runs.make_data(tmp_path)
    metrics = {"log_freq": 1, "enable_wandb": True, "enable_tensorboard": True}

    def run(steps: int, **metrics) -> str:
        """What rank 0 printed."""
        config = runs.make_config(data, tmp_path / "run", steps=steps, metrics=metrics, **runs.FSDP2)
        errors, printed = zip(*pools[2].run(run_offline, config), strict=True)
        assert errors == ("", ""), printed
        return printed[0]

    assert "WARNING" not in run(2, **metrics)
    (run_id,) = logged_ids(tmp_path / "run")
    steps = [tmp_path / "run" / "checkpoint" / f"step-{n}" for n in (2, 4, 6)]
    assert saved_id(steps[0]) == run_id
    events = EventAccumulator(str(tmp_path / "run" / "tb" / "run"))
    events.Reload()
    mean, largest = ([e.value for e in events.Scalars(f"loss_metrics/global_{kind}_loss")] for kind in ("avg", "max"))
    assert len(mean) == 2 and all(0 < most - loss < 1 for loss, most in zip(mean, largest, strict=True))

    assert "resumed from" in run(4, **metrics)
    assert logged_ids(tmp_path / "run") == [run_id, run_id] and saved_id(steps[1]) == run_id
    assert "unknown to titan" not in run(6)  # without wandb the id is kept for a later run
    assert logged_ids(tmp_path / "run") == [run_id, run_id] and saved_id(steps[2]) == run_id
    assert verify(steps[2]).ok
    reshard(steps[2], tmp_path / "resharded")
    assert saved_id(tmp_path / "resharded") == run_id


def test_a_checkpoint_without_an_id_is_resumed_with_wandb(pools, tmp_path):
    data = runs.make_data(tmp_path)
    for steps, enable in ((2, False), (4, True)):
        config = runs.make_config(data, tmp_path / "run", steps=steps, metrics={"enable_wandb": enable})
        assert pools[1].run(run_offline, config)[0][0] == ""
    assert saved_id(tmp_path / "run" / "checkpoint" / "step-2") is None
    assert [saved_id(tmp_path / "run" / "checkpoint" / "step-4")] == logged_ids(tmp_path / "run")
