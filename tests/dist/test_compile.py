"""Compiled blocks train as one eager rank does, in each kind of layout: one graph for all layers and steps."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.dist.layouts import (
    AOT_EAGER,
    CP,
    EVEN,
    FULL,
    GQA,
    MICROBATCH,
    ONE_RANK,
    OP,
    PP,
    QWEN_GQA,
    REPLICAS,
    SCHEDULE,
    TIED,
    TP,
)
from tests.dist.training import (
    Layout,
    build_model,
    first_gradients,
    on_a_fresh_compiler,
    own_batch,
    train,
    validation_loss,
)

STEPS = 3
MODEL_ONLY = AOT_EAGER | {"components": ("model",)}
BF16 = {"mixed_precision_param": "bfloat16"}


def compiled(name: str, world_size: int = 1, parallelism: dict | None = None, **sections: dict) -> Layout:
    training = sections.pop("training", {})
    return Layout(name, world_size, parallelism or {}, training, sections={"compile": MODEL_ONLY} | sections)


CASES = [
    (compiled("tp 2, operations kept", 2, {TP: 2}, activation_checkpoint=OP), QWEN_GQA),
    (compiled("pp 2", 2, {PP: 2, MICROBATCH: 2}), TIED),
    (compiled("cp 2, operations kept", 2, {CP: 2}, activation_checkpoint=OP), GQA),
    (compiled("one rank"), GQA),
    (compiled("fsdp 2 tp 2", 4, {TP: 2}), GQA),
    (compiled("fsdp 2", 2), TIED),
    (compiled("tp 2", 2, {TP: 2}), TIED),
    (compiled("cp 2", 2, {CP: 2}), GQA),
    (compiled("hsdp 2x2", 4, {REPLICAS: 2}), GQA),
    (compiled("interleaved", 2, {PP: 2, MICROBATCH: 2, SCHEDULE: "Interleaved1F1B"} | EVEN), TIED),
    (compiled("fsdp 2, full", 2, activation_checkpoint=FULL), TIED),
    (compiled("pp 2, full", 2, {PP: 2, MICROBATCH: 2}, activation_checkpoint=FULL), GQA),
    (compiled("tp 2, memory budget", 2, {TP: 2}, activation_checkpoint={"mode": "memory_budget"}), GQA),
    (compiled("fsdp 2 tp 2 pp 2", 8, {TP: 2, PP: 2, MICROBATCH: 2}), TIED),
    (compiled("fsdp 2 tp 2", 4, {TP: 2}), QWEN_GQA),
    (Layout("fsdp 2 tp 2, loss too", 4, {TP: 2}, sections={"compile": AOT_EAGER}), TIED),
    (Layout("inductor, fsdp 2", 2, sections={"compile": {"enable": True, "components": ("model",)}}), GQA),
]


@pytest.fixture(scope="module")
def on_one_rank(pools):
    """(case, flavor, …) → what an eager rank tells; computed once."""
    text = {}

    def run(case, flavor: str, *args):
        key = (case, flavor, *args)
        if key not in text:
            text[key] = pools[1].run(case, ONE_RANK, flavor, *args)[0]
        return text[key]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flavor"),
    CASES,
    ids=lambda value: value.name if isinstance(value, Layout) else value,
)
def test_losses_equal_one_eager_rank(pools, on_one_rank, layout, flavor):
    one = on_one_rank(train, flavor, STEPS)
    for text, num_graphs, num_breaks in pools[layout.world_size].run(on_a_fresh_compiler, train, layout, flavor, STEPS):
        assert text["losses"] == pytest.approx(one["losses"], abs=5e-6, rel=0)
        assert text["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert num_breaks == 0
        if layout.sections["compile"].get("components") == ("model",):
            assert num_graphs == 1  # of all layers and steps


def test_gradients_of_every_parameter_are_those_of_one_eager_rank(pools, on_one_rank):
    """Losses of the first steps would hardly show the gradient of one parameter."""
    layout, expected = compiled("tp 2", 2, {TP: 2}), on_one_rank(first_gradients, TIED)
    for found, num_graphs, num_breaks in pools[2].run(on_a_fresh_compiler, first_gradients, layout, TIED):
        assert (num_graphs, num_breaks) == (1, 0)
        assert found.keys() == expected.keys()
        for fqn, gradient in expected.items():
            assert (found[fqn] - gradient).norm() <= 1e-5 * gradient.norm(), fqn


def _norm(gradient: torch.Tensor) -> float:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).norm().item()


def validate_and_train(layout: Layout, flavor: str) -> tuple[float, dict[str, float], float]:
    """Case: validation, on sequences of another length, before and after the gradients of a step."""
    model = build_model(layout, flavor)
    before = validation_loss(model)
    model.forward_backward(own_batch(model, 0), 1000.0)
    gradients = {fqn: _norm(parameter.grad) for fqn, parameter in model.named_parameters().items()}
    return before, gradients, validation_loss(model)


@pytest.mark.slow
def test_validation_of_another_length_compiles_once_more(pools, on_one_rank):
    before, gradients, after = on_one_rank(validate_and_train, GQA)
    layout = compiled("tp 2", 2, {TP: 2})
    (told_before, told_gradients, told_after), num_graphs, _ = pools[2].run(
        on_a_fresh_compiler, validate_and_train, layout, GQA
    )[0]
    assert (told_before, told_after) == pytest.approx((before, after), abs=5e-6, rel=0)
    assert told_gradients == pytest.approx(gradients, rel=1e-4)
    assert num_graphs == 2  # with and without gradients


def dtypes_inside(layout: Layout, flavor: str) -> set[torch.dtype]:
    """What the layers of a step take in and give."""
    model = build_model(layout, flavor)
    seen = set()
    for part in model.parts:
        for layer in part.layers.values():
            layer.register_forward_hook(lambda _, inputs, output: seen.update((inputs[0].dtype, output.dtype)))
    model.forward_backward(own_batch(model, 0), 1.0)
    return seen


def test_mixed_precision_reaches_compiled_blocks(pools):
    layout = compiled("fsdp 2", 2, training=BF16)
    assert all(seen == {torch.bfloat16} for seen, _, _ in pools[2].run(on_a_fresh_compiler, dtypes_inside, layout, GQA))
