"""Track the point of the step at which a recorder is: hooks on modules, on FSDP and on pipeline stages.

In a pipeline the point is set at each action and stays until the next one, as the schedule's loop keeps its local
variables: what the loop sends or frees after a microbatch is at that microbatch's point, with no module. Actions of a
stage as a whole have microbatch -1: phase `forward` where FSDP gathers a stage ahead, `backward` where it reshards the
stage, `reduce` where the stage's gradients are reduced. Receiving, and the end of a send or a reduction, have phases of
their own: from torch 2.15 on, buffers are allocated and freed there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves

from titan_tools.memory.trace.events import NO_LAYER, layer_of
from titan_tools.memory.trace.recorder import Recorder
from trainer.models.units import ModelPart
from trainer.parallel.one_rank import ComputeCopy

# By the actions' names in torch's pipeline schedules; those of WAIT_ are new in torch 2.15
PHASES = {
    **dict.fromkeys(("F", "SEND_F", "UNSHARD"), "forward"),
    **dict.fromkeys(("B", "I", "SEND_B", "RESHARD"), "backward"),
    "W": "weight",
    "RECV_F": "receive_input",
    "RECV_B": "receive_gradient",
    "WAIT_SEND_F": "output_sent",
    "WAIT_SEND_B": "gradient_sent",
    "REDUCE_GRAD": "reduce",
    "WAIT_REDUCE_GRAD": "reduced",
}
NO_STAGE = -1
_NEW_IN_2_15 = {"allocate_buffer", "_output_slot_is_releasable", "release_fwd_send_outputs"}
_PLAIN = Tensor()
_STREAMS = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")

Function = Callable[..., Any]


@contextmanager
def track_points(recorder: Recorder) -> Iterator[None]:
    """Follow the actions of pipeline stages, and label what FSDP gathers and reduces."""
    with ExitStack() as patches:
        for owner, name, replacement in _REPLACEMENTS:
            if (own := owner.__dict__.get(name)) is None and name in _NEW_IN_2_15:
                continue
            patches.enter_context(patch.object(owner, name, _replaced(own, replacement, recorder)))
        yield


def _replaced(own: Function, replacement: Function, recorder: Recorder) -> Function:
    @wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        return replacement(own, recorder, *args, **kwargs)

    return run


def track_modules(parts: Sequence[ModelPart], recorder: Recorder, *, holds_last: bool) -> None:
    """Follow the units of the model: forward from a unit's start to the next, backward from its output's gradient.

    `holds_last`: the last of `parts` returns the loss. Call this after everything that wraps modules, so that the work
    of their hooks is at the right point.
    """
    for part in parts:
        units = part.units()
        recorder.layers_of_parts.append(frozenset(layer_of(unit.name) for unit in units) - {NO_LAYER})
        for fqn, module, *_ in units:
            recorder.module_fqns |= dict.fromkeys(module.modules(), fqn)  # experts may have a group of their own
            _track_module(module, fqn, recorder)
    if holds_last:
        _track_module(parts[-1], "loss", recorder, forward=False)


def _track_module(module: nn.Module, fqn: str, recorder: Recorder, *, forward: bool = True) -> None:
    def start_forward(module: nn.Module, args: Any) -> None:
        recorder.point = recorder.point._replace(module=fqn)

    def end_forward(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(start_backward)  # type: ignore[no-untyped-call]

    def start_backward(gradient: Tensor) -> None:
        phase = "weight" if recorder.point.phase == "weight" else "backward"
        recorder.point = recorder.point._replace(phase=phase, module=fqn)

    if forward:
        module.register_forward_pre_hook(start_forward, prepend=True)
    module.register_forward_hook(end_forward, prepend=True)


def _gather(own: Function, recorder: Recorder, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
    """A group's parameters, maybe while another module runs: prefetched, or gathered for a whole stage."""
    with recorder.as_part("all_gather", owner=_module_of(group, recorder)):
        return own(group, *args, **kwargs)


def _cast(own: Function, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
    with recorder.as_part("all_gather"):
        own(*args, **kwargs)


def _post_backward(own: Function, recorder: Recorder, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
    """A group's gradients are complete: unsharded before, this rank's shards after."""
    before = recorder.point
    if before.phase == "reduce":
        recorder.point = before._replace(module=_module_of(group, recorder))
    for parameter in group.fsdp_params:
        _label_gradients(parameter, recorder)
    with recorder.as_part("reduce_scatter"):
        own(group, *args, **kwargs)
    for parameter in group.fsdp_params:
        _label_gradients(parameter, recorder)
    recorder.point = before


def _module_of(group: FSDPParamGroup, recorder: Recorder) -> str:
    """The FQN of a group's module, of the first if there are several; FSDP itself learns it only in the first step."""
    return recorder.module_fqns.get(group.modules[0], "")


def _label_gradients(parameter: Any, recorder: Recorder) -> None:
    held = [parameter.unsharded_accumulated_grad, parameter.sharded_param.grad]
    if hasattr(parameter, "_unsharded_param"):
        held.append(parameter._unsharded_param.grad)
    for gradient in held:
        if gradient is not None:
            recorder.reclassify(gradient, "gradients")


def _name_streams(own: Function, recorder: Recorder, context: FSDPCommContext, *args: Any, **kwargs: Any) -> None:
    """Each FSDP root makes its own streams."""
    own(context, *args, **kwargs)
    count = len({name.partition("/")[2] for name in recorder.stream_names.values()})
    for name in _STREAMS:
        recorder.name_stream(getattr(context, f"{name}_stream"), f"{name}/{count}" if count else name)


def _pad_once(own: Function, recorder: Recorder, parameter: Any, *args: Any, **kwargs: Any) -> None:
    """Do not pad an uneven shard again that is padded already: FSDP compares addresses, which fake tensors lack."""
    held = parameter._sharded_param_data.untyped_storage()
    if held._cdata != parameter.sharded_param._local_tensor.untyped_storage()._cdata:
        own(parameter, *args, **kwargs)


def _run_unrecorded(own: Function, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """DTensor finds shapes by running operations on fake tensors, in a real run too."""
    with recorder.paused():
        return own(*args, **kwargs)


def _set_point(recorder: Recorder, phase: str, stage: int, microbatch: int = -1) -> None:
    """A stage starts work on this microbatch of the schedule (-1: on none)."""
    if microbatch >= 0:
        microbatch += recorder.first_microbatch
    recorder.point = recorder.point._replace(phase=phase, stage=stage, microbatch=microbatch, module="")


def _name_action(own: Function, recorder: Recorder, action: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedules of several stages per rank name each action for the profiler, just before they run it."""
    microbatch = -1 if action.microbatch_index is None else action.microbatch_index
    if (phase := PHASES.get(action.computation_type.value)) is not None:  # else a later torch's
        _set_point(recorder, phase, action.stage_index, microbatch)
    return own(action, *args, **kwargs)


def _compute_chunk(
    phase: str,
    own: Function,
    recorder: Recorder,
    stage: _PipelineStageBase,
    microbatch: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _set_point(recorder, phase, stage.stage_index, microbatch)
    result = own(stage, microbatch, *args, **kwargs)
    _set_point(recorder, phase, stage.stage_index, microbatch)
    return result


def _reduce_stage(own: Function, recorder: Recorder, stage: _PipelineStageBase, *args: Any, **kwargs: Any) -> None:
    _set_point(recorder, "reduce", stage.stage_index)
    own(stage, *args, **kwargs)
    _set_point(recorder, "reduce", stage.stage_index)


def _end_step(own: Function, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
    """All microbatches are done: what follows belongs to none of them, nor to a stage."""
    _set_point(recorder, "forward", NO_STAGE)
    own(*args, **kwargs)


def _make_buffers(own: Function, recorder: Recorder, stage: _PipelineStageBase, *args: Any, **kwargs: Any) -> Any:
    """Before the first microbatch a stage allocates one receive buffer for each."""
    point = recorder.point._replace(phase="build", stage=stage.stage_index, microbatch=-1, module="")
    with recorder.at(point), recorder.as_part("pipeline_buffers"):
        return own(stage, *args, **kwargs)


def _make_buffer(own: Function, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """A stage receives one tensor per microbatch, and allocates their buffers in order."""
    if recorder.point.phase == "build":
        recorder.point = recorder.point._replace(microbatch=recorder.point.microbatch + 1)
    return own(*args, **kwargs)


def _receive(own: Function, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """From torch 2.15 on, a buffer is allocated for each microbatch when it is received."""
    with recorder.as_part("pipeline_buffers"):
        return own(*args, **kwargs)


def _start_receiving(
    phase: str, own: Function, recorder: Recorder, stage: _PipelineStageBase, microbatch: int, *args: Any, **kwargs: Any
) -> Any:
    _set_point(recorder, phase, stage.stage_index, microbatch)
    return own(stage, microbatch, *args, **kwargs)


def _release(
    own: Function, recorder: Recorder, stage: _PipelineStageBase, microbatch: int, *args: Any, **kwargs: Any
) -> None:
    before = recorder.point
    _set_point(recorder, "output_sent", stage.stage_index, microbatch)
    own(stage, microbatch, *args, **kwargs)
    recorder.point = before


def _is_released(own: Function, recorder: Recorder, stage: _PipelineStageBase, output: Any) -> Any:
    """From torch 2.15 on, a plain tensor is released once it is sent; a fake one stands for a plain one."""
    return own(stage, _PLAIN if type(output) is FakeTensor else output)


def _defining(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in each.__dict__)


# (owner, name of a function or method, what replaces it and is called with it, the recorder, and its arguments)
_REPLACEMENTS: tuple[tuple[Any, str, Function], ...] = (
    (ShardingPropagator, "_propagate_tensor_meta_non_cached", _run_unrecorded),
    (FSDPCommContext, "lazy_init", _name_streams),
    (FSDPParam, "reset_sharded_param", _pad_once),
    (ComputeCopy, "show", _cast),
    (FSDPParamGroup, "unshard", _gather),
    (FSDPParamGroup, "wait_for_unshard", _gather),
    (FSDPParamGroup, "post_backward", _post_backward),
    (schedules, "_get_profiler_function_name", _name_action),
    (_PipelineSchedule, "_update_losses", _end_step),
    (stages, "_make_tensor_from_meta", _make_buffer),
    (_defining(PipelineStage, "_prepare_forward_infra"), "_prepare_forward_infra", _make_buffers),
    (_defining(PipelineStage, "_prepare_backward_infra"), "_prepare_backward_infra", _make_buffers),
    (stages._RecvInfo, "allocate_buffer", _receive),
    (_PipelineStageBase, "_output_slot_is_releasable", _is_released),
    (_PipelineStageBase, "release_fwd_send_outputs", _release),
    (_PipelineStageBase, "get_fwd_recv_ops", partial(_start_receiving, PHASES["RECV_F"])),
    (_PipelineStageBase, "get_bwd_recv_ops", partial(_start_receiving, PHASES["RECV_B"])),
    (_PipelineStageBase, "forward_one_chunk", partial(_compute_chunk, "forward")),
    (_PipelineStageBase, "backward_one_chunk", partial(_compute_chunk, "backward")),
    (_PipelineStageBase, "backward_weight_one_chunk", partial(_compute_chunk, "weight")),
    (_PipelineStageBase, "perform_reduce_grad", _reduce_stage),
)
