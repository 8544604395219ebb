"""Windows, chunks, sinks and temperatures: a step in any layout has the loss and gradients of one rank."""

from pathlib import Path

import pytest
import torch

from tests.dist.layouts import AOT_EAGER, CP, FULL, MICROBATCH, ONE_RANK, OP, PP, SCHEDULE, TP
from tests.dist.training import (
    BIASED_EXPERTS,
    SCALED_EXPERTS,
    SEQ_LEN,
    Layout,
    _gradients_of_a_step,
    args_of,
    build_model,
    validation_loss,
)

WINDOW, SCOUT, MAVERICK = (
    f"{BIASED_EXPERTS}/debug_window",
    f"{SCALED_EXPERTS}/debug_scout",
    f"{SCALED_EXPERTS}/debug_maverick",
)
PIPE = {PP: 2, MICROBATCH: 2}
CASES = [
    (Layout("cp 2, full recomputation", 2, {CP: 2}, sections={"activation_checkpoint": FULL}), WINDOW),
    (Layout("cp 2", 2, {CP: 2}), SCOUT),
    (Layout("tp 2, operations kept", 2, {TP: 2}, sections={"activation_checkpoint": OP}), WINDOW),
    (Layout("pp 2", 2, PIPE), SCOUT),
]
SLOW_CASES = [
    (Layout("tp 2 pp 2", 4, PIPE | {TP: 2}), MAVERICK),
    (Layout("tp 2 pp 2 cp 2", 8, PIPE | {TP: 2, CP: 2}), MAVERICK),
    (Layout("compiled, cp 2", 2, {CP: 2}, sections={"compile": AOT_EAGER}), WINDOW),
    (Layout("cp 4", 4, {CP: 4}), WINDOW),
    (Layout("cp 4", 4, {CP: 4}), SCOUT),
    (Layout("fsdp 2 tp 2", 4, {TP: 2}), WINDOW),
    (Layout("tp 2", 2, {TP: 2}), SCOUT),
    (Layout("pp 2", 2, PIPE | {SCHEDULE: "GPipe"}), WINDOW),
    (Layout("tp 2 cp 2, operations kept", 4, {TP: 2, CP: 2}, sections={"activation_checkpoint": OP}), WINDOW),
    (Layout("tp 2 pp 2 cp 2", 8, PIPE | {TP: 2, CP: 2}), WINDOW),
    (Layout("compiled, tp 2", 2, {TP: 2}, sections={"compile": AOT_EAGER, "activation_checkpoint": OP}), WINDOW),
    (Layout("compiled, fsdp 2", 2, sections={"compile": AOT_EAGER}), SCOUT),
    (Layout("fsdp 2, offloaded", 2, training={"enable_cpu_offload": True}), WINDOW),
]


def step(layout: Layout, flavor: str) -> dict:
    """Case: the loss of longer sequences, which have other masks, before and after a step; and its gradients."""
    torch._dynamo.reset()
    model = build_model(layout, flavor)
    losses = [validation_loss(model)]
    gradients = _gradients_of_a_step(model, layout.config(flavor))
    return {"losses": [*losses, validation_loss(model)], "gradients": gradients}


def reference(flavor: str, path: Path) -> None:
    """Case, one rank."""
    torch.save(step(ONE_RANK, flavor), path)


def differences(layout: Layout, flavor: str, path: Path) -> dict:
    """Case: relative distances from the reference."""
    expected, found = torch.load(path), step(layout, flavor)
    wanted = expected["gradients"]
    return {
        "losses": [ours / theirs - 1 for ours, theirs in zip(found["losses"], expected["losses"], strict=True)],
        "gradients": {n: ((g - wanted[n]).norm() / wanted[n].norm()).item() for n, g in found["gradients"].items()},
    }


@pytest.fixture(scope="module")
def one_rank(pools, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("windows"), {}

    def run(flavor: str) -> Path:
        if flavor not in made:
            made[flavor] = folder / f"{flavor.replace('/', '-')}.pt"
            pools[1].run(reference, flavor, made[flavor])
        return made[flavor]

    return run


def names(value) -> str:
    return getattr(value, "name", value)


def test_sequences_are_longer_than_windows_chunks_and_the_temperatures_length():
    window, scout = args_of(WINDOW), args_of(SCOUT)
    assert SEQ_LEN // 4 > window.window > 1  # also in the halves of four context ranks
    assert scout.temperature_length < 2 * scout.chunk < SEQ_LEN and SEQ_LEN % scout.chunk


@pytest.mark.parametrize(
    ("layout", "flavor"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)], ids=names
)
def test_a_layout_computes_windows_and_chunks_as_one_rank(pools, one_rank, layout, flavor):
    path = one_rank(flavor)
    for found in pools[layout.world_size].run(differences, layout, flavor, path):
        assert found["losses"] == pytest.approx([0, 0], abs=1e-6)
        assert {fqn: error for fqn, error in found["gradients"].items() if not error <= 1e-5} == {}
