"""Any layout trains as one rank does: same first weights, same data, same losses; the same layout twice is bit-equal."""

import pytest

from tests.dist.training import Layout, train

STEPS = 20
ONE_RANK = Layout("one rank")
LAYOUTS = [
    Layout("fsdp 2", 2),
    Layout("tp 2", 2, {"tensor_parallel_degree": 2}),
    Layout("cp 2", 2, {"context_parallel_degree": 2}),
    Layout("pp 2", 2, {"pipeline_parallel_degree": 2}),
    Layout("fsdp 2 cp 2", 4, {"context_parallel_degree": 2}),
    Layout("fsdp 2 tp 2 pp 2", 8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
]


@pytest.fixture(scope="module")
def one_rank(pools):
    return {flavor: pools[1].run(train, ONE_RANK, flavor, STEPS)[0] for flavor in ("debug_gqa", "debug_tied")}


@pytest.mark.parametrize("flavor", ["debug_gqa", "debug_tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_losses_equal_one_rank(pools, one_rank, layout, flavor):
    ranks = pools[layout.world_size].run(train, layout, flavor, STEPS)
    assert all(told == ranks[0] for told in ranks)
    assert ranks[0]["losses"] == pytest.approx(one_rank[flavor]["losses"], abs=5e-6, rel=0)
    assert ranks[0]["norms"] == pytest.approx(one_rank[flavor]["norms"], rel=1e-4)
    assert ranks[0]["losses"][-1] != ranks[0]["losses"][0]
