"""The order in which pipeline ranks compute forward only: what is computed exists, and nobody waits without need."""

import pytest

from converters.layout.stages import ranks_of_stages
from trainer.parallel.pipeline import forward_order


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(
    ("pp", "num_stages", "v_shaped"), [(2, 2, False), (4, 4, False), (2, 4, False), (4, 12, False), (4, 8, True)]
)
def test_each_stage_computes_each_microbatch_once_after_the_stage_before(pp, num_stages, v_shaped, num_microbatches):
    ranks = ranks_of_stages(num_stages, pp, v_shaped=v_shaped)
    when = {}
    for time, computed in enumerate(forward_order(ranks, num_microbatches)):
        for rank, (stage, number) in computed.items():
            assert ranks[stage] == rank and (stage, number) not in when
            assert stage == 0 or when[stage - 1, number] < time
            when[stage, number] = time
    assert len(when) == num_stages * num_microbatches


@pytest.mark.parametrize(("pp", "rounds"), [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_ranks_of_several_stages_work_without_a_gap_once_the_pipeline_is_full(pp, rounds):
    """One microbatch at a time, each would come back to a rank before the next one starts: pp · rounds times longer."""
    ranks = ranks_of_stages(pp * rounds, pp, v_shaped=False)
    num_microbatches = 2 * pp
    order = list(forward_order(ranks, num_microbatches))
    assert len(order) == rounds * num_microbatches + pp - 1
    for rank in range(pp):
        busy = [time for time, computed in enumerate(order) if rank in computed]
        assert busy == list(range(rank, rank + rounds * num_microbatches))
