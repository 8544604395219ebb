"""Where a step of a pipeline stands: told action by action, and kept until the next one, as the loop keeps its locals.

What a schedule's loop does after a microbatch (it sends, it lets go of what it sent before) is told as this
microbatch's, with no module. What belongs to a stage but to no microbatch has microbatch -1: `forward` where FSDP
gathers a stage ahead, `backward` where it lets it go, `reduce` where gradients meet at a stage's end.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

from titan_tools.memory.trace.record.recorder import Recorder

PHASES = {
    **dict.fromkeys(("F", "SEND_F", "RECV_F", "UNSHARD"), "forward"),
    **dict.fromkeys(("B", "I", "SEND_B", "RECV_B", "RESHARD"), "backward"),
    "W": "weight",
    "REDUCE_GRAD": "reduce",
}

NO_STAGE = -1

Wrap = Callable[[Callable, Recorder], Callable]


def tell(recorder: Recorder, phase: str, stage: int, microbatch: int = -1) -> None:
    """From here on a stage works on this microbatch of the schedule's (-1: on none), until something else is told."""
    if microbatch >= 0:
        microbatch += recorder.first_microbatch
    recorder.place = recorder.place._replace(phase=phase, stage=stage, microbatch=microbatch, module="")


def _of_action(own: Callable, recorder: Recorder) -> Callable:
    """Schedules of several stages per rank name each action for the profiler, just before they take it."""

    def name(action: Any) -> str:
        microbatch = -1 if action.microbatch_index is None else action.microbatch_index
        tell(recorder, PHASES[action.computation_type.value], action.stage_index, microbatch)
        return own(action)

    return name


def _of_microbatch(phase: str) -> Wrap:
    def wrap(own: Callable, recorder: Recorder) -> Callable:
        def run(stage: _PipelineStageBase, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            tell(recorder, phase, stage.stage_index, microbatch)
            result = own(stage, microbatch, *args, **kwargs)
            tell(recorder, phase, stage.stage_index, microbatch)
            return result

        return run

    return wrap


def _reduces(own: Callable, recorder: Recorder) -> Callable:
    def perform_reduce_grad(stage: _PipelineStageBase, *args: Any) -> None:
        tell(recorder, "reduce", stage.stage_index)
        own(stage, *args)
        tell(recorder, "reduce", stage.stage_index)

    return perform_reduce_grad


def _ends(own: Callable, recorder: Recorder) -> Callable:
    """All microbatches are through: what follows belongs to none of them, nor to a stage."""

    def update_losses(schedule: _PipelineSchedule, held: Any, *args: Any) -> None:
        tell(recorder, "forward", NO_STAGE)
        own(schedule, held, *args)

    return update_losses


def _makes_buffers(own: Callable, recorder: Recorder) -> Callable:
    """Before the first microbatch: one buffer for each that is received."""

    def prepare(stage: _PipelineStageBase, *args: Any, **kwargs: Any) -> Any:
        place = recorder.place._replace(phase="build", stage=stage.stage_index, microbatch=-1, module="")
        with recorder.at(place), recorder.as_part("pipeline_buffers"):
            return own(stage, *args, **kwargs)

    return prepare


def _next_buffer(own: Callable, recorder: Recorder) -> Callable:
    """A stage receives one tensor per microbatch, and makes room for them in order."""

    def make_tensor(*args: Any) -> Tensor:
        if recorder.place.phase == "build":
            recorder.place = recorder.place._replace(microbatch=recorder.place.microbatch + 1)
        return own(*args)

    return make_tensor


def _defining(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in each.__dict__)


# (where, which function or method, what to put around it)
PIPELINE_WRAPS: tuple[tuple[Any, str, Wrap], ...] = (
    (schedules, "_get_profiler_function_name", _of_action),
    (_PipelineSchedule, "_update_losses", _ends),
    (stages, "_make_tensor_from_meta", _next_buffer),
    *(
        (_defining(PipelineStage, name), name, _makes_buffers)
        for name in ("_prepare_forward_infra", "_prepare_backward_infra")
    ),
    (_PipelineStageBase, "forward_one_chunk", _of_microbatch("forward")),
    (_PipelineStageBase, "backward_one_chunk", _of_microbatch("backward")),
    (_PipelineStageBase, "backward_weight_one_chunk", _of_microbatch("weight")),
    (_PipelineStageBase, "perform_reduce_grad", _reduces),
)
