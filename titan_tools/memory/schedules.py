"""The order in which a pipeline rank runs forwards and backwards, by torch's own schedules."""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from converters.stages import ranks_of_stages
from trainer.parallel.stages import V_SCHEDULES

Kind = Literal["F", "B", "I", "W", "gather", "reshard", "reduce"]
_KINDS: dict[str, Kind] = {  # of torch's actions, without sends and receives
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

    F, B: forward and full backward of a microbatch; I, W: backward's gradients of inputs, then those of weights. The
    others are FSDP's, for a stage as a whole: gather it, reshard it, reduce its gradients.
    """

    kind: Kind
    stage: int
    microbatch: int = -1  # -1: none


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
    """Forwards and backwards of a schedule of one stage per rank, for which torch has a loop instead of a plan.

    GPipe: all forwards, then all backwards. 1F1B: as many forwards as there are stages from this one on, then a
    backward before each further forward.
    """
    warmup = num_microbatches if schedule == "GPipe" else min(num_microbatches, num_stages - stage)
    order = [Action("F", stage, mb) for mb in range(warmup)]
    for mb in range(num_microbatches):
        order.append(Action("B", stage, mb))
        if warmup + mb < num_microbatches:
            order.append(Action("F", stage, warmup + mb))
    return order
