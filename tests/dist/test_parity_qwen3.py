"""Qwen 3 in any layout trains as one rank does. Its own part: norms of q and k, whole on every tensor-parallel rank."""

import pytest

from tests.dist.training import Layout, first_gradients, initial_differences, train

STEPS = 3
ONE = Layout("one rank")
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("fsdp 2", 2),
        Layout("tp 2", 2, {"tensor_parallel_degree": 2}),
        Layout("cp 2", 2, {"context_parallel_degree": 2}),
        Layout("pp 2", 2, {"pipeline_parallel_degree": 2}),
        Layout("fsdp 2 tp 2", 4, {"tensor_parallel_degree": 2}, activation_checkpoint="selective", selective="op"),
    )
}
CASES = [(name, "qwen3/debug_gqa") for name in ("fsdp 2", "tp 2", "cp 2")] + [("pp 2", "qwen3/debug_tied")]


@pytest.fixture(scope="module")
def on_one_rank(pools):
    """flavor → what the steps told, and the first gradients."""
    return {
        flavor: (pools[1].run(train, ONE, flavor, STEPS)[0], pools[1].run(first_gradients, ONE, flavor)[0])
        for flavor in {flavor for _, flavor in CASES}
    }


@pytest.mark.parametrize(("name", "flavor"), CASES)
def test_losses_equal_one_rank(pools, on_one_rank, name, flavor):
    one, ranks = on_one_rank[flavor][0], pools[LAYOUTS[name].world_size].run(train, LAYOUTS[name], flavor, STEPS)
    assert all(told == ranks[0] for told in ranks)
    assert ranks[0]["losses"] == pytest.approx(one["losses"], abs=5e-6, rel=0)
    assert ranks[0]["norms"] == pytest.approx(one["norms"], rel=1e-4)


@pytest.mark.parametrize("name", ["tp 2", "fsdp 2 tp 2"])
def test_gradients_of_every_parameter_are_those_of_one_rank(pools, on_one_rank, name):
    """Losses of AdamW would not show a gradient of one rank's heads only."""
    expected = on_one_rank["qwen3/debug_gqa"][1]
    for found in pools[LAYOUTS[name].world_size].run(first_gradients, LAYOUTS[name], "qwen3/debug_gqa"):
        assert found.keys() == expected.keys()
        for fqn, gradient in found.items():
            assert (gradient - expected[fqn]).norm() <= 1e-5 * expected[fqn].norm(), fqn
    norms = [fqn for fqn in expected if fqn.endswith(("q_norm.weight", "k_norm.weight"))]
    assert len(norms) == 8 and all(expected[fqn].abs().max() > 1e-5 for fqn in norms)


@pytest.mark.parametrize("name", ["tp 2", "pp 2"])
def test_first_weights_are_those_of_the_seed(pools, name):
    for differing, count in pools[2].run(initial_differences, LAYOUTS[name], "qwen3/debug_gqa"):
        assert differing == [] and count > 0
