"""The order of what a pipeline rank does against torch's own pipeline schedules."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from converters.errors import UnsupportedError
from converters.layout import ranks_of_stages
from titan_tools.memory.schedules import actions_of_rank, with_sharding
from trainer.parallel.stages import V_SCHEDULES

SHARDING = {"UNSHARD": "gather", "RESHARD": "reshard", "REDUCE_GRAD": "reduce"}


def torch_order(name: str, pp: int, num_stages: int, num_microbatches: int) -> list[list[tuple[str, int, int]]]:
    """What torch's class does on each rank, without sends."""
    schedule = get_schedule_class(name)
    if issubclass(schedule, PipelineScheduleMulti):
        return planned_orders(name, pp, num_stages, num_microbatches)
    return [observed_order(schedule, pp_rank, pp, num_microbatches) for pp_rank in range(pp)]


def planned_orders(name, pp, num_stages, num_microbatches):
    """From the plan that a schedule of several stages makes first."""
    ranks = ranks_of_stages(num_stages, pp, v_shaped=name in V_SCHEDULES)
    stages = [
        SimpleNamespace(group_size=pp, group_rank=0, num_stages=num_stages, stage_index=stage, submod=None)
        for stage in range(num_stages)
        if ranks[stage] == 0
    ]
    planned = get_schedule_class(name)(stages, n_microbatches=num_microbatches).pipeline_order_with_comms
    return [
        [
            (SHARDING.get(kind, kind), action.stage_index, -1 if kind in SHARDING else action.microbatch_index)
            for action in planned[pp_rank]
            if not (kind := action.computation_type.value).startswith(("SEND", "RECV"))
        ]
        for pp_rank in range(pp)
    ]


def observed_order(schedule, pp_rank, pp, num_microbatches):
    """By running the step with a stage that only writes down what is asked of it: the table is off by one for 1F1B."""
    done = []
    stage = MagicMock(stage_index=pp_rank)
    for ask in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ask).return_value = []
    stage.forward_one_chunk.side_effect = lambda mb, *args, **kwargs: done.append(("F", pp_rank, mb))
    stage.backward_one_chunk.side_effect = lambda mb, **kwargs: done.append(("B", pp_rank, mb))
    stage.perform_reduce_grad.side_effect = lambda *args: done.append(("reduce", pp_rank, -1))
    runner = MagicMock(_stage=stage, _n_microbatches=num_microbatches, _num_stages=pp)
    runner._check_inputs.return_value = ([()] * num_microbatches, [{}] * num_microbatches)
    schedule._step_microbatches(runner)
    return done


@pytest.mark.parametrize(
    ("name", "pp", "num_stages", "num_microbatches"),
    [
        ("GPipe", 2, 2, 4),
        ("GPipe", 4, 4, 3),
        ("1F1B", 2, 2, 2),
        ("1F1B", 4, 4, 8),
        ("Interleaved1F1B", 2, 4, 2),
        ("Interleaved1F1B", 4, 8, 12),
        ("Interleaved1F1B", 4, 12, 4),
        ("Interleaved1F1B", 4, 8, 3),
        ("Interleaved1F1B", 2, 10, 4),  # more stages than torch keeps gathered
        ("LoopedBFS", 2, 4, 4),
        ("LoopedBFS", 4, 12, 5),
        ("LoopedBFS", 2, 10, 3),
        ("InterleavedZeroBubble", 2, 4, 2),
        ("InterleavedZeroBubble", 4, 8, 12),
        ("InterleavedZeroBubble", 4, 20, 4),
        ("InterleavedZeroBubble", 4, 8, 3),
        ("ZBVZeroBubble", 2, 4, 2),
        ("ZBVZeroBubble", 4, 8, 12),
        ("ZBVZeroBubble", 4, 8, 3),
    ],
)
def test_order_is_torchs(name, pp, num_stages, num_microbatches):
    for rank, expected in enumerate(torch_order(name, pp, num_stages, num_microbatches)):
        ours = actions_of_rank(name, pp_rank=rank, pp=pp, num_stages=num_stages, num_microbatches=num_microbatches)
        assert [(a.kind, a.stage, a.microbatch) for a in with_sharding(ours, name)] == expected, rank


def test_an_unknown_schedule_is_not_covered():
    with pytest.raises(UnsupportedError, match="DualPipeV"):
        actions_of_rank("DualPipeV", pp_rank=0, pp=2, num_stages=4, num_microbatches=4)
