"""Mixed precision: bf16 inside and fp32 outside, in every layout alike, one rank and pure TP or PP included."""

import pytest
import torch

from tests.dist.training import Layout, build_model, global_batch, own_batch, train

BF16 = {"mixed_precision_param": "bfloat16"}
LAYOUTS = [
    Layout("one rank", 1, {}, BF16),
    Layout("fsdp 2", 2, {}, BF16),
    Layout("tp 2", 2, {"tensor_parallel_degree": 2}, BF16),
    Layout("pp 2", 2, {"pipeline_parallel_degree": 2}, BF16),
    Layout("cp 2", 2, {"context_parallel_degree": 2}, BF16),
]


def dtypes(layout: Layout) -> dict[str, set[torch.dtype]]:
    """What a step computes with and leaves behind."""
    model = build_model(layout, "debug_gqa")
    seen = {"hidden": set(), "angles": set()}

    def look(module, args):
        hidden, turns = args
        seen["hidden"].add(hidden.dtype)
        seen["angles"].add(turns.dtype)

    for part in model.parts:
        for layer in part.layers.values():
            layer.register_forward_pre_hook(look)
    model.forward_backward(own_batch(model, 0), global_batch(0).num_valid_tokens)
    seen["weights"] = {p.dtype for p in model.named_parameters().values()}
    seen["gradients"] = {p.grad.dtype for p in model.named_parameters().values()}
    return seen


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_what_is_bf16_and_what_is_not(pools, layout):
    for seen in pools[layout.world_size].run(dtypes, layout):
        assert seen["hidden"] == {torch.bfloat16}
        assert seen["angles"] == {torch.float32}
        assert seen["weights"] == seen["gradients"] == {torch.float32}


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.name)
def test_losses_equal_one_rank_up_to_bf16(pools, layout):
    exact = pools[1].run(train, Layout("fp32"), "debug_gqa", 3)[0]["losses"]
    one = pools[1].run(train, LAYOUTS[0], "debug_gqa", 3)[0]["losses"]
    told = pools[layout.world_size].run(train, layout, "debug_gqa", 3)[0]["losses"]
    rounding = max(abs(a - b) for a, b in zip(one, exact, strict=True))
    assert rounding > 0
    assert told == pytest.approx(one, abs=3 * rounding, rel=0)


def test_weights_kept_in_bf16(pools):
    layout = Layout("fsdp 2", 2, {}, BF16 | {"dtype": "bfloat16"})
    seen = pools[2].run(dtypes, layout)[0]
    assert seen["weights"] == seen["gradients"] == seen["hidden"] == {torch.bfloat16}
    assert seen["angles"] == {torch.float32}
