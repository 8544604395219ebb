"""The order of what a pipeline rank does against torch's own pipeline schedules."""

from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from titan_tools.memory.schedules import actions_of_rank, allocates_on_receipt


def observed_order(schedule, pp_rank, pp, num_microbatches):
    """By running the step with a stage that only writes down what is asked of it: the table is off by one for 1F1B."""
    done = []
    stage = MagicMock(stage_index=pp_rank)

    def note(kind):
        return lambda mb, *args, **kwargs: done.append((kind, pp_rank, mb)) or []

    stage.get_fwd_recv_ops.side_effect, stage.get_bwd_recv_ops.side_effect = note("RECV_F"), note("RECV_B")
    stage.get_fwd_send_ops.side_effect = stage.get_bwd_send_ops.side_effect = lambda mb: []
    stage.release_fwd_send_outputs.side_effect = note("WAIT_SEND_F")
    stage.forward_one_chunk.side_effect, stage.backward_one_chunk.side_effect = note("F"), note("B")
    stage.perform_reduce_grad.side_effect = lambda *args: done.append(("reduce", pp_rank, -1))
    runner = MagicMock(_stage=stage, _n_microbatches=num_microbatches, _num_stages=pp)
    runner._check_inputs.return_value = ([()] * num_microbatches, [{}] * num_microbatches)
    schedule._step_microbatches(runner)
    return done


@pytest.mark.parametrize(
    ("name", "pp", "num_microbatches"), [("GPipe", 2, 4), ("GPipe", 4, 3), ("1F1B", 2, 2), ("1F1B", 4, 8)]
)
def test_order_of_a_loop_is_torchs(name, pp, num_microbatches):
    for rank in range(pp):
        ours = actions_of_rank(name, pp_rank=rank, pp=pp, num_stages=pp, num_microbatches=num_microbatches)
        if not allocates_on_receipt():  # then nothing shows in a stage when a send has been waited for
            ours = [action for action in ours if action.kind != "WAIT_SEND_F"]
        expected = observed_order(get_schedule_class(name), rank, pp, num_microbatches)
        assert [(a.kind, a.stage, a.microbatch) for a in ours] == expected, rank


@pytest.mark.parametrize(
    ("name", "backward", "stages"),
    [
        ("Interleaved1F1B", "B", (1, 5)),
        ("LoopedBFS", "B", (1, 5)),
        ("InterleavedZeroBubble", "W", (1, 5)),
        ("ZBVZeroBubble", "W", (1, 6)),
    ],
)
def test_a_planned_stage_is_gathered_computed_and_reduced(name, backward, stages):
    actions = actions_of_rank(name, pp_rank=1, pp=4, num_stages=8, num_microbatches=8)
    assert {action.stage for action in actions} == set(stages)
    for stage in stages:
        own = [(action.kind, action.microbatch) for action in actions if action.stage == stage]
        for kind in ("F", backward):
            assert sorted(mb for each, mb in own if each == kind) == list(range(8))
        own = [(kind, mb) for kind, mb in own if not kind.startswith("RECV")]
        assert own[0] == ("gather", -1)
        last = max(at for at, (kind, _) in enumerate(own) if kind == backward)
        assert [kind for kind, _ in own[last + 1 :]] == ["reduce", "reshard"]
