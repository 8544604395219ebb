"""A loss or norm that is no number, on one rank only: all ranks agree before the update, and stop or leave it out."""

import json
import math

import pytest
import torch
import torch.distributed as dist

from converters.common.names import RUN_LOCK
from tests.dist import runs
from trainer.train_model import TrainModel

FSDP2 = runs.FSDP2
PP2 = {"parallelism": {"pipeline_parallel_degree": 2}}
BAD_STEP = 3


def run_with_a_bad_step(config, kind):
    """Case: on the last rank alone, step 3 has a loss of NaN, or finite losses and a gradient of infinity."""
    whole, num_calls = TrainModel.forward_backward, 0
    training = config.training
    dp = dist.get_world_size() // config.parallelism.pipeline_parallel_degree
    calls_per_step = training.global_batch_size // (training.local_batch_size * dp)

    def poisoned(model, batch, num_units):
        nonlocal num_calls
        num_calls += 1
        loss = whole(model, batch, num_units)
        if num_calls != BAD_STEP * calls_per_step or dist.get_rank() != dist.get_world_size() - 1:
            return loss
        if kind == "nan":
            return loss * math.nan
        gradient = next(iter(model.named_parameters().values())).grad
        getattr(gradient, "_local_tensor", gradient).flatten()[0] = torch.inf
        return loss

    TrainModel.forward_backward = poisoned
    try:
        return runs.run(config)
    finally:
        TrainModel.forward_backward = whole


def _records(dump):
    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    lines = (dump / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in (json.loads(line, parse_constant=no_constant) for line in lines)}


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        ("nan", FSDP2, "loss is nan"),
        ("inf", PP2, "gradient norm is inf"),
        pytest.param("inf", FSDP2, "gradient norm is inf", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_before_the_update_with_the_last_good_step(pools, data, tmp_path, kind, layout, message):
    config = runs.make_config(data, tmp_path, **layout)
    for error in pools[2].run(run_with_a_bad_step, config, kind):
        assert error.startswith("NumericalFault: step 3: ") and message in error and "checkpoint is step 2" in error
    assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == {RUN_LOCK, "step-2"}
    assert _records(tmp_path).keys() == {1, 2}


@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param("nan", FSDP2, marks=pytest.mark.slow), ("inf", PP2)], ids=["nan", "inf"]
)
def test_a_skipped_step_leaves_weights_and_moments_bit_equal(pools, data, tmp_path, kind, layout):
    layout = layout | {"training": layout.get("training", {}) | {"on_nonfinite": "skip"}, "checkpoint": {"interval": 1}}
    config = runs.make_config(data, tmp_path / "skipped", steps=5, **layout)
    assert pools[2].run(run_with_a_bad_step, config, kind) == ["", ""]
    steps = tmp_path / "skipped" / "checkpoint"
    differing = {message.partition(":")[0] for message in runs.differences(steps / "step-3", steps / "step-2")}
    assert {name for name in differing if not name.startswith("optimizer.param_groups.")} == {
        "dataloader.consumed_samples", "lr_scheduler.last_epoch", "train_state.step", "train_state.skipped_steps"
    }  # fmt: skip
    learning_rates = differing - {name for name in differing if not name.endswith(".lr")}
    assert differing == learning_rates | {name for name in differing if not name.startswith("optimizer.")}
    assert any("exp_avg" in message for message in runs.differences(steps / "step-4", steps / "step-3"))

    records = _records(tmp_path / "skipped")
    assert [records[n]["skipped_steps"] for n in range(1, 6)] == [0, 0, 1, 1, 1]
    assert ("loss" in records[3], "grad_norm" in records[3]) == (kind == "inf", kind == "nan")
    assert records[3]["ntokens_seen"] == records[2]["ntokens_seen"] < records[4]["ntokens_seen"]

    # Resumed behind it, the count goes on, and so do the same batches
    runs.begin_from(tmp_path / "resumed", tmp_path / "skipped", 3)
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path / "resumed", steps=5, **layout)) == ["", ""]
    assert _records(tmp_path / "resumed")[5]["skipped_steps"] == 1
    assert runs.differences(tmp_path / "resumed" / "checkpoint" / "step-5", steps / "step-5") == []


def test_a_checkpoint_that_does_not_count_skipped_steps_is_taken(pools, data, tmp_path, monkeypatch):
    config = runs.make_config(data, tmp_path, steps=2)
    assert pools[1].run(run_as_before_skipping, config) == [""]
    assert pools[1].run(runs.run, runs.make_config(data, tmp_path, steps=3)) == [""]
    assert _records(tmp_path)[3]["skipped_steps"] == 0


def run_as_before_skipping(config):
    """Case: a run whose checkpoints hold no `train_state.skipped_steps`."""
    from trainer.checkpoints.run_state import RunState

    whole = RunState.sections

    def without(state):
        sections = whole(state)
        del sections["train_state"]["skipped_steps"]
        return sections

    RunState.sections = without
    try:
        return runs.run(config)
    finally:
        RunState.sections = whole
