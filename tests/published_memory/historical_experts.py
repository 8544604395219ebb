"""torchtitan v0.2.1's mixture of experts and rotation of DeepSeek, which use memory differently from ours.

After its sources (December 2025). Shape letters as in trainer/models/moe.py; P rows with the padding.
"""

from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from trainer.config.sections import Compile
from trainer.models.moe import MoE
from trainer.parallel.expert_parallel import Exchange
from trainer.parallel.expert_shards import ShardedExperts

_MULTIPLE = 8  # of each expert's rows: TOKEN_GROUP_ALIGN_SIZE_M


def complex_rotate(x_BLNH: Tensor, rotations: Tensor) -> Tensor:
    """models/deepseek_v3/model/model.py, apply_rotary_emb, compiled or not. `rotations` [L, 1, P], complex."""
    pairs = torch.view_as_complex(x_BLNH.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x_BLNH)


def narrow_gate(gate: nn.Linear, x_TD: Tensor) -> Tensor:
    """Until #2389 the router's product is in the model's dtype. Scores are in fp32."""
    return F.linear(x_TD, gate.weight).float()


def padded_experts(moe: MoE, x_BLD: Tensor) -> Tensor:
    """models/moe/moe.py until #2774: rows are padded for each expert, put back into zeros, and weighted in fp32."""
    x_TD = x_BLD.flatten(0, 1)
    ids_TK, weights_TK = moe.router(x_TD, moe.expert_bias)
    order_R = ids_TK.flatten().argsort(stable=True)
    num_experts = len(moe.expert_bias)
    counts_E = torch.histc(ids_TK.flatten().float(), bins=num_experts, min=0, max=num_experts).int()
    out_RD = _exchanged(moe, x_TD[order_R // ids_TK.shape[1]], counts_E)
    shared = None if moe.shared_experts is None else moe.shared_experts(x_BLD)
    unsorted_RD = torch.zeros_like(out_RD)
    unsorted_RD[order_R] = out_RD
    of_experts = torch.bmm(weights_TK.unsqueeze(1), unsorted_RD.view(*ids_TK.shape, -1).float())
    out_BLD = of_experts.type_as(x_BLD).view_as(x_BLD)
    return out_BLD if shared is None else shared + out_BLD


def _exchanged(moe: MoE, x_RD: Tensor, counts_E: Tensor) -> Tensor:
    """distributed/expert_parallel.py, ExpertParallel: to the ranks that hold the experts, and back."""
    exchange = moe.dispatch.compute
    if not isinstance(exchange, Exchange):
        return _padded(moe, x_RD, counts_E)
    num_received = ceil(exchange._imbalance * len(x_RD))
    counts_L = counts_E[: len(counts_E) // exchange._num_ranks]
    return _all_to_all(_padded(moe, _all_to_all(x_RD, num_received), counts_L), len(x_RD))


def _padded(moe: MoE, x_SD: Tensor, counts_L: Tensor) -> Tensor:
    """models/moe/utils.py, _permute and _unpermute: a row of zeros stands for the padding."""
    num_rows = ceil((len(x_SD) + len(counts_L) * _MULTIPLE) / _MULTIPLE) * _MULTIPLE
    sizes_L = (counts_L.clamp_min(_MULTIPLE) + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
    rows_P = _padded_order(counts_L, sizes_L, num_rows=num_rows, num_given=len(x_SD))
    extended = torch.vstack((x_SD, x_SD.new_zeros(x_SD.shape[-1])))
    out_PD = moe.experts(extended[rows_P], sizes_L.cumsum(0, dtype=torch.int32))
    unsorted = out_PD.new_empty(extended.shape)
    unsorted[rows_P] = out_PD
    return unsorted[:-1]


def _padded_order(counts_L: Tensor, sizes_L: Tensor, *, num_rows: int, num_given: int) -> Tensor:
    """Of each padded row the given one, or the row of zeros after them: int32 [P]."""
    places_P = torch.arange(num_rows, dtype=torch.int32)
    expert_P = torch.searchsorted(sizes_L.cumsum(0), places_P, right=True).clamp_max(len(counts_L) - 1)
    within_P = places_P - (sizes_L.cumsum(0) - sizes_L)[expert_P]
    given_P = (counts_L.cumsum(0) - counts_L)[expert_P] + within_P
    return torch.where(within_P < counts_L[expert_P], given_P, num_given).int()


@torch.library.custom_op("titan_published::all_to_all", mutates_args=())
def _all_to_all(x_RD: Tensor, num_received: int) -> Tensor:
    """all_to_all_single_autograd of fake rows: its result is all that it allocates."""
    return x_RD.new_empty(num_received, x_RD.shape[1])


@_all_to_all.register_fake
def _(x_RD: Tensor, num_received: int) -> Tensor:
    return x_RD.new_empty(num_received, x_RD.shape[1])


def _keep_rows(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.num_sent = len(inputs[0])


def _send_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _all_to_all(gradient.contiguous(), ctx.num_sent), None


_all_to_all.register_autograd(_send_back, setup_context=_keep_rows)

KEPT_EXCHANGES = (torch.ops.titan_published.all_to_all.default,)
"""What selective checkpointing keeps of an exchange: v0.2.1's save list has all_to_all_single."""


def compile_submodules(model: nn.Module, settings: Compile) -> None:
    """models/llama4/infra/parallelize.py, apply_compile: of a layer with experts each module by itself.

    FSDP's hooks on experts would be inside of its graph.
    """
    compiled = partial(torch.compile, backend=settings.backend, fullgraph=True, dynamic=False)
    for layer in model.layers.values():
        moe = getattr(layer, "moe", None)
        parts = [layer]
        if moe is not None:
            parts = [layer.attention_norm, layer.attention, layer.ffn_norm, moe.router, moe.shared_experts]
        for part in filter(None, parts):
            part.forward = compiled(part.forward)


def shard_experts(model: nn.Module, experts: ShardedExperts, options: dict[str, Any]) -> None:
    """Experts in FSDP groups of their own, over their own mesh, until #2281; apply_fsdp of the same file."""
    own = {"mesh": experts._mesh, "shard_placement_fn": lambda _: experts._placement}
    for layer in model.layers.values():
        if hasattr(layer, "moe"):
            fully_shard(layer.moe.experts, **options | own)


def prefetch_groups(model: nn.Module) -> None:
    """The groups of the next layer are gathered during this one, in forward and in backward; apply_fsdp."""
    layers, ends = list(model.layers.values()), [model.norm, model.output] if model.output is not None else []
    begin = [model.tok_embeddings] if model.tok_embeddings is not None else []
    groups = [[layer, layer.moe.experts] if hasattr(layer, "moe") else [layer] for layer in layers]
    for layer, following in zip(layers, [*groups[1:], ends], strict=True):
        layer.set_modules_to_forward_prefetch(following)
    for layer, following in zip(layers, [begin, *groups[:-1]], strict=True):
        layer.set_modules_to_backward_prefetch(following)
    for module in begin:
        module.set_modules_to_forward_prefetch(layers[:1])
    for module in ends[-1:]:
        module.set_modules_to_backward_prefetch(layers[-1:])
