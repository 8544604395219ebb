"""The order of forwards and backwards against torch's own pipeline schedules."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    PipelineScheduleMulti,
    get_schedule_class,
)

from converters.errors import UnsupportedError
from titan_tools.memory.schedules import actions_of_rank

KINDS = {FORWARD: "F", FULL_BACKWARD: "B"}


def torch_order(name: str, pp_rank: int, pp: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int, int]]:
    """What torch's class does on a rank."""
    schedule = get_schedule_class(name)
    if issubclass(schedule, PipelineScheduleMulti):
        return planned_order(schedule, pp_rank, pp, num_stages // pp, num_microbatches)
    return observed_order(schedule, pp_rank, pp, num_microbatches)


def planned_order(schedule, pp_rank, pp, num_local, num_microbatches):
    """From the table that a schedule of several stages makes first; idle slots are None there."""
    rounds = max(1, num_microbatches // pp)
    settings = SimpleNamespace(
        pp_group_size=pp,
        _n_microbatches=num_microbatches,
        n_local_stages=num_local,
        _stages=[None] * num_local,
        number_of_rounds=rounds,
        microbatches_per_round=num_microbatches // rounds,
    )
    order = schedule._calculate_single_rank_operations(settings, pp_rank)
    return [(KINDS[a.computation_type], a.stage_index, a.microbatch_index) for a in order if a is not None]


def observed_order(schedule, pp_rank, pp, num_microbatches):
    """By running the step with a stage that only writes down what is asked of it: the table is off by one for 1F1B."""
    done = []
    stage = MagicMock(stage_index=pp_rank)
    for ask in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ask).return_value = []
    stage.forward_one_chunk.side_effect = lambda mb, *args, **kwargs: done.append(("F", pp_rank, mb))
    stage.backward_one_chunk.side_effect = lambda mb, **kwargs: done.append(("B", pp_rank, mb))
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
        ("LoopedBFS", 2, 4, 4),
        ("LoopedBFS", 4, 12, 5),
    ],
)
def test_order_is_torchs(name, pp, num_stages, num_microbatches):
    for rank in range(pp):
        ours = actions_of_rank(name, pp_rank=rank, pp=pp, num_stages=num_stages, num_microbatches=num_microbatches)
        expected = torch_order(name, rank, pp, num_stages, num_microbatches)
        assert [(a.kind, a.stage, a.microbatch) for a in ours] == expected, rank


def test_an_unknown_schedule_is_not_covered():
    with pytest.raises(UnsupportedError, match="ZBVZeroBubble"):
        actions_of_rank("ZBVZeroBubble", pp_rank=0, pp=2, num_stages=4, num_microbatches=4)
