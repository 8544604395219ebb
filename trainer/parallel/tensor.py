"""Tensor parallelism with sequence and loss parallelism: a plan's styles in DTensor terms."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.models.tensor_plan import TensorStyle
from trainer.parallel.embedding import RowsOfVocabulary
from trainer.parallel.latents import ColumnsOfGathered, GatherLatents

if TYPE_CHECKING:
    from trainer.models.units import ModelPart

_SEQUENCE = Shard(1)  # of [B, L, D]
_HEADS = Shard(0)  # of sinks
_HEADS_DIM = 2  # of [B, L, heads, H]


def apply_tp(
    model: "ModelPart",
    mesh: DeviceMesh,
    plan: Mapping[str, TensorStyle],
    *,
    loss_parallel: bool,
    converted: Mapping[str, ParallelStyle] | None = None,
) -> None:
    """Shard the modules that a plan names and this stage has.

    Logits are plain local tensors: this rank's columns of the vocabulary with loss parallelism, else whole.
    `converted` are styles of modules that a converter has replaced.
    """
    present = {name for name, _ in model.named_modules()}
    styles = {fqn: _parallel_style(style, loss_parallel=loss_parallel) for fqn, style in plan.items() if fqn in present}
    for fqn in present & {fqn for fqn, style in plan.items() if style is TensorStyle.GATHER_SEQUENCE}:
        _pass_by_name(model.get_submodule(fqn))
    parallelize_module(model, mesh, styles | dict(converted or {}))
    for fqn in (fqn for fqn, style in plan.items() if style is TensorStyle.SINKS):
        attention, _, name = fqn.rpartition(".")
        if attention in present:
            _shard_sinks(model.get_submodule(attention), name, mesh)
    model.tie()  # the two modules have separate DTensors now


def _pass_by_name(module: nn.Module) -> None:
    """Pass all inputs but the first by name: torch's style for the first refuses other positional ones."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def pass_by_name(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        named = dict(zip(names, args, strict=False)) | named
        if len(args) > len(names) or not names or names[0] not in named:
            return None  # not an input of `forward`, which says so
        return (named.pop(names[0]),), named

    module.register_forward_pre_hook(pass_by_name, with_kwargs=True)


def _shard_sinks(attention: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Give each rank those of its heads, and the inner attention plain tensors of them."""
    whole = attention.get_parameter(name)
    setattr(attention, name, nn.Parameter(distribute_tensor(whole, mesh, [_HEADS]), whole.requires_grad))
    read: dict[str, Placement] = {"sinks_N": _HEADS}
    local = PrepareModuleInput(input_kwarg_layouts=read, desired_input_kwarg_layouts=read, use_local_output=True)
    parallelize_module(attention.get_submodule("inner_attention"), mesh, local)


def _parallel_style(style: TensorStyle, *, loss_parallel: bool) -> ParallelStyle:
    match style:
        case TensorStyle.EMBEDDING:
            return RowsOfVocabulary()
        case TensorStyle.SEQUENCE_SHARDS:
            # local, as the outputs of other modules: a model may add it to one
            return SequenceParallel(use_local_output=True)
        case TensorStyle.HEADS:
            # torch's style for replicated weights over any sharded dim; it sums their gradients over the ranks
            return SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)
        case TensorStyle.SINKS:
            raise AssertionError("a parameter, and no module")
        case TensorStyle.TOKENS:
            return SequenceParallel(sequence_dim=0, use_local_output=True)
        case TensorStyle.GATHER_SEQUENCE:
            return PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=Replicate())
        case TensorStyle.COLUMNS:
            return ColwiseParallel()
        case TensorStyle.COLUMNS_OF_GATHERED:
            return ColumnsOfGathered()
        case TensorStyle.GATHERED_COLUMNS:
            return ColwiseParallel(input_layouts=_SEQUENCE)
        case TensorStyle.GATHER_LATENTS:
            return GatherLatents(_SEQUENCE)
        case TensorStyle.ROWS:
            return RowwiseParallel(output_layouts=_SEQUENCE)
        case TensorStyle.PARTIAL_ROWS:
            return RowwiseParallel(output_layouts=Partial())
        case TensorStyle.LOGITS:
            return ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Shard(-1) if loss_parallel else Replicate())
