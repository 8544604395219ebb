"""The order of what a pipeline rank does against torch's own pipeline schedules."""

from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from converters.layout.stages import ranks_of_stages
from titan_tools.memory.expand.order import END, allocates_on_receipt, orders_of_ranks
from titan_tools.memory.trace.tracking import PHASES
from trainer.parallel.stages import V_SCHEDULES, StageSplit


def observed_order(schedule, pp_rank, pp, num_microbatches):
    """By running the step with a stage that only writes down what is asked of it: the table is off by one for 1F1B."""
    done = []
    stage = MagicMock(stage_index=pp_rank)

    def note(kind):
        return lambda mb, *args, **kwargs: done.append((PHASES[kind], 0, mb)) or []

    stage.get_fwd_recv_ops.side_effect, stage.get_bwd_recv_ops.side_effect = note("RECV_F"), note("RECV_B")
    stage.get_fwd_send_ops.side_effect = stage.get_bwd_send_ops.side_effect = lambda mb: []
    stage.release_fwd_send_outputs.side_effect = note("WAIT_SEND_F")
    stage.forward_one_chunk.side_effect, stage.backward_one_chunk.side_effect = note("F"), note("B")
    stage.perform_reduce_grad.side_effect = lambda *args: done.append(("reduce", 0, -1))
    runner = MagicMock(_stage=stage, _n_microbatches=num_microbatches, _num_stages=pp)
    runner._check_inputs.return_value = ([()] * num_microbatches, [{}] * num_microbatches)
    schedule._step_microbatches(runner)
    return done


def actions_of(schedule, pp_rank, *, pp, num_stages, num_microbatches):
    ranks = ranks_of_stages(num_stages, pp, v_shaped=schedule in V_SCHEDULES)
    split = StageSplit(((),) * num_stages, ranks)
    return orders_of_ranks(schedule, split, pp, num_microbatches, reshards=False)[pp_rank].actions


@pytest.mark.parametrize(
    ("name", "pp", "num_microbatches"), [("GPipe", 2, 4), ("GPipe", 4, 3), ("1F1B", 2, 2), ("1F1B", 4, 8)]
)
def test_order_of_a_loop_is_torchs(name, pp, num_microbatches):
    for rank in range(pp):
        ours = list(actions_of(name, rank, pp=pp, num_stages=pp, num_microbatches=num_microbatches))
        ours.remove(END)
        if not allocates_on_receipt():  # then nothing shows in a stage when a send has been waited for
            ours = [action for action in ours if action.phase != PHASES["WAIT_SEND_F"]]
        assert ours == observed_order(get_schedule_class(name), rank, pp, num_microbatches), rank


@pytest.mark.parametrize(
    ("name", "backward"),
    [("Interleaved1F1B", "B"), ("LoopedBFS", "B"), ("InterleavedZeroBubble", "W"), ("ZBVZeroBubble", "W")],
)
def test_a_planned_stage_is_gathered_computed_and_reduced(name, backward):
    actions = actions_of(name, 1, pp=4, num_stages=8, num_microbatches=8)
    assert {action.part for action in actions} == {0, 1}
    for part in (0, 1):
        own = [(action.phase, action.microbatch) for action in actions if action.part == part and action != END]
        own = [(phase, mb) for phase, mb in own if not phase.startswith("receive")]
        for phase in ("forward", PHASES[backward]):
            assert sorted(mb for each, mb in own if each == phase and mb >= 0) == list(range(8))
        assert own[0] == (PHASES["UNSHARD"], -1)
        assert own[-2:] == [("reduce", -1), (PHASES["RESHARD"], -1)]
