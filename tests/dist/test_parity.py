"""Any layout trains as one rank does: from the same seed on the same data, the same losses."""

import pytest

from tests.dist.training import Layout, train

STEPS = 20
FLAVORS = ("debug_gqa", "debug_tied")
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one rank"),
        Layout("fsdp 2", 2),
        Layout("tp 2", 2, {"tensor_parallel_degree": 2}),
        Layout("cp 2", 2, {"context_parallel_degree": 2}),
        Layout("pp 2", 2, {"pipeline_parallel_degree": 2}),
        Layout("fsdp 2 cp 2", 4, {"context_parallel_degree": 2}),
        Layout("fsdp 2 tp 2 pp 2", 8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    )
}


@pytest.fixture(scope="module")
def trained(pools):
    """(layout, flavor) → what 20 steps of it told on each rank; trained once."""
    told = {}

    def run(name: str, flavor: str) -> list[dict]:
        if (name, flavor) not in told:
            layout = LAYOUTS[name]
            told[name, flavor] = pools[layout.world_size].run(train, layout, flavor, STEPS)
        return told[name, flavor]

    return run


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one rank"])
def test_losses_equal_one_rank(trained, name, flavor):
    (one,), ranks = trained("one rank", flavor), trained(name, flavor)
    assert all(told == ranks[0] for told in ranks)
    assert ranks[0]["losses"] == pytest.approx(one["losses"], abs=5e-6, rel=0)
    assert ranks[0]["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert one["losses"][-1] < one["losses"][0] - 0.2  # something was learnt


@pytest.mark.parametrize(("name", "flavor"), [("fsdp 2 tp 2 pp 2", "debug_tied"), ("fsdp 2 cp 2", "debug_gqa")])
def test_a_rerun_is_bit_equal(pools, trained, name, flavor):
    again = pools[LAYOUTS[name].world_size].run(train, LAYOUTS[name], flavor, 8)
    assert again[0]["losses"] == trained(name, flavor)[0]["losses"][:8]
    assert again[0]["norms"] == trained(name, flavor)[0]["norms"][:8]
