"""Where a step stands, told to a recorder by hooks on the model's modules, on FSDP and on pipeline stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves

from titan_tools.memory.trace.record.pipeline_places import PIPELINE_WRAPS, Wrap
from titan_tools.memory.trace.record.recorder import Recorder

_STREAMS = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")


@contextmanager
def places_told(recorder: Recorder) -> Iterator[None]:
    """Within, what FSDP gathers and reduces, and what pipeline stages do, is told as such."""
    with ExitStack() as patches:
        for owner, name, wrap in (
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", _not_recorded),
            (FSDPCommContext, "lazy_init", _streams_named),
            (FSDPParam, "reset_sharded_param", _padded_once),
            (FSDPParamGroup, "unshard", _gathering),
            (FSDPParamGroup, "wait_for_unshard", _gathering),
            (FSDPParamGroup, "post_backward", _reducing),
            *PIPELINE_WRAPS,
        ):
            patches.enter_context(_patched(owner, name, wrap, recorder))
        yield


def watch_modules(parts: Sequence[nn.Module], recorder: Recorder) -> None:
    """Tell the recorder which module runs: from its forward's beginning, and from its output's gradient, to the next.

    Comes after all that wraps modules, so that what their hooks do happens in the right place.
    """
    for part in parts:
        named = [(name, getattr(part, name)) for name in ("tok_embeddings", "norm", "output")]
        named += [(f"layers.{number}", layer) for number, layer in part.layers.items()]
        recorder.layers_of_parts.append(frozenset(map(int, part.layers)))
        for fqn, module in named:
            if module is not None:
                recorder.module_fqns[module] = fqn
                _watch(module, fqn, recorder)
        if part.output is not None:
            _watch(part, "loss", recorder, forward=False)


def _watch(module: nn.Module, fqn: str, recorder: Recorder, *, forward: bool = True) -> None:
    def enters(module: nn.Module, args: Any) -> None:
        recorder.place = recorder.place._replace(module=fqn)

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(goes_back)

    def goes_back(gradient: Tensor) -> None:
        phase = "weight" if recorder.place.phase == "weight" else "backward"
        recorder.place = recorder.place._replace(phase=phase, module=fqn)

    if forward:
        module.register_forward_pre_hook(enters, prepend=True)
    module.register_forward_hook(leaves, prepend=True)


@contextmanager
def _patched(owner: Any, name: str, wrap: Wrap, recorder: Recorder) -> Iterator[None]:
    own = owner.__dict__[name]
    setattr(owner, name, wraps(own)(wrap(own, recorder)))
    try:
        yield
    finally:
        setattr(owner, name, own)


def _gathering(own: Callable, recorder: Recorder) -> Callable:
    """A group's parameters, maybe while another module runs: the next one's, or all of a stage's."""

    def run(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        with recorder.as_part("all_gather", owner=_module_of(group, recorder)):
            return own(group, *args, **kwargs)

    return run


def _not_recorded(own: Callable, recorder: Recorder) -> Callable:
    """DTensor asks for shapes by running operations on whole tensors, which are fake also in a real run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return own(*args, **kwargs)

    return run


def _padded_once(own: Callable, recorder: Recorder) -> Callable:
    """Before its first forward FSDP pads uneven shards anew, unless they lie in the memory that it has padded.

    It knows that memory by its address, which fake tensors have none of.
    """

    def reset_sharded_param(parameter: FSDPParam) -> None:
        held = parameter._sharded_param_data.untyped_storage()
        if held._cdata != parameter.sharded_param._local_tensor.untyped_storage()._cdata:
            own(parameter)

    return reset_sharded_param


def _streams_named(own: Callable, recorder: Recorder) -> Callable:
    """Each FSDP root makes its own streams."""

    def lazy_init(context: FSDPCommContext, device: Any) -> None:
        own(context, device)
        count = len({name.partition("/")[2] for name in recorder.stream_names.values()})
        for name in _STREAMS:
            recorder.name_stream(getattr(context, f"{name}_stream"), f"{name}/{count}" if count else name)

    return lazy_init


def _reducing(own: Callable, recorder: Recorder) -> Callable:
    """A group's gradients are complete: whole ones before, this rank's shards after."""

    def post_backward(group: FSDPParamGroup, *unused: Any) -> None:
        before = recorder.place
        if before.phase == "reduce":
            recorder.place = before._replace(module=_module_of(group, recorder))
        for parameter in group.fsdp_params:
            _tell_gradients(parameter, recorder)
        with recorder.as_part("reduce_scatter"):
            own(group, *unused)
        for parameter in group.fsdp_params:
            _tell_gradients(parameter, recorder)
        recorder.place = before

    return post_backward


def _module_of(group: FSDPParamGroup, recorder: Recorder) -> str:
    """The FQN of the module that a group belongs to, of the first if they are several; FSDP itself learns it late."""
    return recorder.module_fqns.get(group.modules[0], "")


def _tell_gradients(parameter: Any, recorder: Recorder) -> None:
    held = [parameter.unsharded_accumulated_grad, parameter.sharded_param.grad]
    if hasattr(parameter, "_unsharded_param"):
        held.append(parameter._unsharded_param.grad)
    for gradient in held:
        if gradient is not None:
            recorder.reclassify(gradient, "gradients")
