"""FSDP2: when it is used, its parameter groups, dtypes, and resharding.

torch is imported inside functions, so that settings are checked without it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Float8, Parallelism, Training
from trainer.parallel.ddp import is_ddp

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.models.units import ModelPart
    from trainer.parallel.expert_shards import ShardedExperts


def is_fsdp(training: Training, parallelism: Parallelism, float8: Float8, dims: MeshShape) -> bool:
    """Whether FSDP wraps the model, also with nothing to shard, for its mixed precision and CPU offload.

    Otherwise TP-only and PP-only runs would compute in another dtype than the same job with other degrees.
    """
    if is_ddp(dims) or computes_in_copies(training, parallelism, float8, dims):
        return False
    is_needed = training.mixed_precision_param != training.dtype or training.enable_cpu_offload
    return dims.fsdp > 1 or dims.dp_replicate > 1 or _shards_experts(dims) or is_needed


def _shards_experts(dims: MeshShape) -> bool:
    """Whether several ranks share what expert parallelism leaves: also if only tensor parallelism has given them."""
    return dims.ep > 1 and dims.efsdp > 1


def computes_in_copies(training: Training, parallelism: Parallelism, float8: Float8, dims: MeshShape) -> bool:
    """Whether one rank has mixed precision without FSDP, with the same numbers in less time (see one_rank.py).

    Not if the config asks for what only FSDP does.
    """
    needs_fsdp = (
        training.enable_cpu_offload
        or float8.enable_fsdp_float8_all_gather
        or parallelism.fsdp_reshard_after_forward == "always"
    )
    return dims.world_size == 1 and training.mixed_precision_param != training.dtype and not needs_fsdp


def offload_problems(training: Training, dims: MeshShape) -> list[str]:
    """CPU offload without FSDP."""
    if not training.enable_cpu_offload or not is_ddp(dims):
        return []
    return [
        "training.enable_cpu_offload needs FSDP, and ranks that hold whole copies (DDP) do not use it; nearest:"
        f" parallelism.data_parallel_replicate_degree = 1 and data_parallel_shard_degree = {dims.world_size}"
    ]


def apply_fsdp(
    model: ModelPart,
    mesh: DeviceMesh,
    *,
    experts: ShardedExperts | None = None,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    reshard_last: bool,
    offload_to_cpu: bool = False,
) -> None:
    """Shard a model (or stage) over `mesh`; a 2-d mesh replicates over its first axis (HSDP).

    Gradients are summed, not averaged: the loss was already divided by the units of progress of all ranks.
    `reshard_last` is for the last units, which backward needs first. `experts`: how those are sharded if the mesh is
    another one.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Inputs need no cast: what first units return is in param_dtype, and other inputs keep their precision.
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)

    # Pinned memory is for copies to and from a GPU.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload_to_cpu else OffloadPolicy()

    def shard(modules: nn.Module | list[nn.Module], *, reshard: bool) -> None:
        options: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload, "reshard_after_forward": reshard}
        if experts is not None:
            experts.shard(modules, mesh, options)
        else:
            fully_shard(modules, mesh=mesh, **options)

    units = model.units()
    for unit in units:
        if unit.place != "last":
            shard(unit.module, reshard=reshard_after_forward)
    if last := [unit.module for unit in units if unit.place == "last"]:
        shard(last, reshard=reshard_last)
    shard(model, reshard=reshard_after_forward)
    model.tie()

    # Under TP a module's output is a view of a DTensor; torch warns about in-place writes, which do not occur.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if mesh.size() > 1 or experts is not None:  # over one rank torch divides even by 1, into a copy
                module.set_gradient_divide_factor(1.0)
            # A plain sum on every backend: gloo has no PREMUL_SUM, which a divide factor would need.
            module.set_force_sum_reduction_for_comms(True)


def keep_on_cpu(model: nn.Module, device: torch.device) -> None:
    """Allocate for CPU offload: parameters on the CPU, everything else, which FSDP does not move, on `device`."""
    model.to_empty(device="cpu")
    for module in model.modules():
        if next(module.parameters(), None) is None:
            module.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def keeps_gathered(training: Training, dims: MeshShape) -> bool:
    """Whether layers stay gathered by default: in a pipeline, where each microbatch would gather them again, and over
    one rank, which would cast them again to save two bytes per parameter; but not under CPU offload.
    """
    shards = dims.fsdp > 1 or _shards_experts(dims)
    return dims.pp > 1 or (not shards and not training.enable_cpu_offload)


def reshard_policy(name: str, *, keeps: bool) -> tuple[bool, bool]:
    """(after a layer's forward, after the output's forward), for `parallelism.fsdp_reshard_after_forward`.

    The default keeps the parameters of layers gathered if `keeps`: see keeps_gathered.
    """
    match name:
        case "always":
            return True, True
        case "never":
            return False, False
        case "default":
            return not keeps, False
    raise AssertionError(name)
