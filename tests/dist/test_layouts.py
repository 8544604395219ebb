"""More layouts, schedules and options, a few steps each: all train as one rank does."""

import pytest

from tests.dist.training import Layout, count_collectives, first_gradients, initial_differences, train, validate

STEPS = 3
PP, TP, CP = "pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"
SCHEDULE = "pipeline_parallel_schedule"
EVEN = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
EXPLICIT = (("tok_embeddings", "layers.0"), ("layers.1", "layers.2", "layers.3", "norm", "output"))
LAYOUTS = [
    Layout("hsdp 2x2", 4, {"data_parallel_replicate_degree": 2}),
    Layout("replicas only", 2, {"data_parallel_replicate_degree": 2}),
    Layout("fsdp 2 tp 2, always resharded", 4, {TP: 2, "fsdp_reshard_after_forward": "always"}),
    Layout("fsdp 2, never resharded", 2, {"fsdp_reshard_after_forward": "never"}),
    Layout("tp 4", 4, {TP: 4}),
    Layout("tp 2, whole logits", 2, {TP: 2, "disable_loss_parallel": True}),
    Layout("tp 2 cp 2", 4, {TP: 2, CP: 2}),
    Layout("pp 4", 4, {PP: 4, **EVEN}),
    Layout("cp 4", 4, {CP: 4}),
    Layout("pp 2 cp 2", 4, {PP: 2, CP: 2}),
    Layout("pp 2 fsdp 2", 4, {PP: 2}),
    Layout("gpipe, microbatches of 4", 2, {PP: 2, SCHEDULE: "GPipe", "pipeline_parallel_microbatch_size": 4}),
    Layout("interleaved", 2, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    Layout("interleaved fsdp 2", 4, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    Layout("looped bfs", 2, {PP: 2, SCHEDULE: "LoopedBFS", "pipeline_parallel_layers_per_stage": 1, **EVEN}),
    Layout("explicit stages", 2, {PP: 2, "module_fqns_per_model_part": EXPLICIT}),
    Layout("full checkpointing", 2, activation_checkpoint="full"),
    Layout("op checkpointing tp 2", 2, {TP: 2}, activation_checkpoint="selective", selective="op"),
    Layout("op checkpointing cp 2", 2, {CP: 2}, activation_checkpoint="selective", selective="op"),
    Layout("every 2nd layer, pp 2", 2, {PP: 2}, activation_checkpoint="selective"),
]


@pytest.fixture(scope="module")
def one_rank(pools):
    layout = Layout("one rank")
    return {
        flavor: {
            "trained": pools[1].run(train, layout, flavor, STEPS)[0],
            "gradients": pools[1].run(first_gradients, layout, flavor)[0],
            "validated": pools[1].run(validate, layout, flavor)[0],
        }
        for flavor in ("debug_gqa", "debug_tied")
    }


@pytest.fixture(params=[(layout, i % 2) for i, layout in enumerate(LAYOUTS)], ids=lambda param: param[0].name)
def case(request):
    """Layout and flavor; the flavors take turns."""
    layout, tied = request.param
    return layout, "debug_tied" if tied else "debug_gqa"


def test_losses_equal_one_rank(pools, one_rank, case):
    layout, flavor = case
    told, one = pools[layout.world_size].run(train, layout, flavor, STEPS)[0], one_rank[flavor]["trained"]
    assert told["losses"] == pytest.approx(one["losses"], abs=5e-6, rel=0)
    assert told["norms"] == pytest.approx(one["norms"], rel=1e-4)


def test_first_gradients_equal_one_rank(pools, one_rank, case):
    layout, flavor = case
    gathered = {}
    for told in pools[layout.world_size].run(first_gradients, layout, flavor):
        for fqn, gradient in told.items():
            assert gathered.setdefault(fqn, gradient).equal(gradient), f"ranks disagree about {fqn}"
    assert gathered.keys() == one_rank[flavor]["gradients"].keys()
    for fqn, gradient in one_rank[flavor]["gradients"].items():
        assert (gathered[fqn] - gradient).norm() <= 1e-5 * gradient.norm(), fqn


def test_first_weights_are_those_of_the_seed(pools, case):
    layout, flavor = case
    told = pools[layout.world_size].run(initial_differences, layout, flavor)
    assert all(not differing for differing, _ in told)
    assert sum(count for _, count in told) > 0


def test_validation_loss_equals_one_rank(pools, one_rank, case):
    layout, flavor = case
    told = pools[layout.world_size].run(validate, layout, flavor)
    assert told[0]["losses"] == pytest.approx(one_rank[flavor]["validated"]["losses"], abs=5e-6, rel=0)


@pytest.mark.parametrize("axis", [TP, CP])
def test_op_checkpointing_waits_for_no_rank_twice(pools, axis):
    plain = Layout("plain", 2, {axis: 2})
    kept = Layout("op", 2, {axis: 2}, activation_checkpoint="selective", selective="op")
    again = Layout("full", 2, {axis: 2}, activation_checkpoint="full")
    once, same, more = (pools[2].run(count_collectives, layout, "debug_gqa") for layout in (plain, kept, again))
    assert once == same
    assert all(0 < a < b for a, b in zip(once, more, strict=True))
