"""The order in which a pipeline rank runs forwards and backwards, by torch's own schedules."""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from converters.layout.stages import ranks_of_stages
from trainer.parallel.stages import V_SCHEDULES

Kind = Literal["F", "B", "I", "W", "gather", "reshard", "reduce", "RECV_F", "RECV_B", "WAIT_SEND_F"]
LOOPS = ("GPipe", "1F1B")  # schedules of one stage per rank, for which torch has a loop instead of a plan
_KINDS: dict[str, Kind] = {  # of torch's actions, without sends
    "RECV_F": "RECV_F",
    "RECV_B": "RECV_B",
    "F": "F",
    "B": "B",
    "I": "I",
    "W": "W",
    "UNSHARD": "gather",
    "RESHARD": "reshard",
    "REDUCE_GRAD": "reduce",
}


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a rank on one of its stages.

    F, B: forward and full backward of a microbatch; I, W: backward's gradients of inputs, then those of weights.
    RECV_F, RECV_B: its input or its output's gradient is received, also where a rank at an end of the pipeline has
    nothing to receive; WAIT_SEND_F: its output has been sent and is not needed any more. The others are FSDP's, for a
    stage as a whole: gather it, reshard it, reduce its gradients.
    """

    kind: Kind
    stage: int
    microbatch: int = -1  # -1: none


@cache
def allocates_on_receipt() -> bool:
    """Whether a stage allocates a buffer when it receives, and frees what was sent: from torch 2.15 on.

    Before, it keeps a buffer of each microbatch for all steps, and what it sends until its backward.
    """
    from torch.distributed.pipelining.stage import _RecvInfo

    return hasattr(_RecvInfo, "allocate_buffer")


def actions_of_rank(schedule: str, *, pp_rank: int, pp: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What a rank of a pipeline does in a step, in time order."""
    if planned := planned_actions(schedule, pp=pp, num_stages=num_stages, num_microbatches=num_microbatches):
        return [
            Action(_KINDS[kind], action.stage_index, -1 if action.microbatch_index is None else action.microbatch_index)
            for action in planned[pp_rank]
            if (kind := action.computation_type.value) in _KINDS
        ]
    order = loop_actions(schedule, stage=pp_rank, num_stages=num_stages, num_microbatches=num_microbatches)
    return [*order, Action("reduce", pp_rank)]


@cache
def planned_actions(schedule: str, *, pp: int, num_stages: int, num_microbatches: int) -> dict[int, list[Any]] | None:
    """By rank, torch's own plan for a schedule of several stages per rank; None for a schedule of one stage.

    Cached: torch simulates all ranks to find the order of sends, and both engines need the plan of one job many times.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    schedule_class = get_schedule_class(schedule)
    if not issubclass(schedule_class, PipelineScheduleMulti):
        return None
    ranks = ranks_of_stages(num_stages, pp, v_shaped=schedule in V_SCHEDULES)
    stages = [
        SimpleNamespace(group_size=pp, group_rank=0, num_stages=num_stages, stage_index=stage, submod=None)
        for stage in range(num_stages)
        if ranks[stage] == 0
    ]
    planned: dict[int, list[Any]] = schedule_class(stages, n_microbatches=num_microbatches).pipeline_order_with_comms
    return planned


def loop_actions(schedule: str, *, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What a rank does in one of LOOPS.

    GPipe: all forwards, then all backwards. 1F1B: as many forwards as there are stages from this one on, then a
    backward before each further forward. It waits for a send before the next one, GPipe for all before a backward.
    """
    is_gpipe = schedule == "GPipe"
    warmup = num_microbatches if is_gpipe else min(num_microbatches, num_stages - stage)
    order: list[Action] = []

    def forward(mb: int) -> None:
        order.extend((Action("RECV_F", stage, mb), Action("F", stage, mb)))

    for mb in range(warmup):
        forward(mb)
        if mb and not is_gpipe:
            order.append(Action("WAIT_SEND_F", stage, mb - 1))
    if is_gpipe:
        order += [Action("WAIT_SEND_F", stage, mb) for mb in range(num_microbatches)]
    for mb in range(num_microbatches):
        order.append(Action("RECV_B", stage, mb))
        if not is_gpipe and (sent := warmup + mb - 1) < num_microbatches:
            order.append(Action("WAIT_SEND_F", stage, sent))
        order.append(Action("B", stage, mb))
        if warmup + mb < num_microbatches:
            forward(warmup + mb)
    return order
