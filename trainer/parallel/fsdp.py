"""FSDP2: which modules are gathered together, in which dtypes, and when they are freed again."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    reshard_last: bool,
) -> None:
    """Shard a model (or stage) over `mesh`; a 2-d mesh replicates over its first axis (HSDP).

    Gradients are summed, not averaged: the loss was already divided by the token count of all ranks. `reshard_last` is
    for norm and output, which backward needs again at once.
    """
    # Inputs need no cast: embeddings come out in param_dtype, and what else goes in keeps its precision.
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)

    def shard(modules: nn.Module | list[nn.Module], *, reshard: bool) -> None:
        fully_shard(modules, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)

    ends = [m for m in (model.norm, model.output) if m is not None]
    if model.args.tied and model.tok_embeddings is not None and model.output is not None:
        ends.insert(0, model.tok_embeddings)  # one parameter cannot be in two groups; it stays gathered in between
    elif model.tok_embeddings is not None:
        shard(model.tok_embeddings, reshard=reshard_after_forward)
    for layer in model.layers.values():
        shard(layer, reshard=reshard_after_forward)
    if ends:
        shard(ends, reshard=reshard_last)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    model.tie()

    # Under TP a module's output is a view of a DTensor; torch warns of writing into it in place, which nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum on every backend: gloo has no PREMUL_SUM, which a divide factor would ask for.
            module.set_force_sum_reduction_for_comms(True)


def reshard_policy(name: str, *, pipelined: bool) -> tuple[bool, bool]:
    """(after a layer's forward, after the output's forward), for `parallelism.fsdp_reshard_after_forward`.

    The default keeps parameters gathered in a pipeline, where every microbatch would gather them anew.
    """
    match name:
        case "always":
            return True, True
        case "never":
            return False, False
        case "default":
            return not pipelined, False
    raise AssertionError(name)
