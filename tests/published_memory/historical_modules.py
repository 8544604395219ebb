"""torchtitan's earlier norms, attention and loss, which use memory differently from ours. After its sources.

Shape letters as in trainer/models/decoder.py.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.published_memory.history import HistoricalBuild
from trainer.data.batch import IGNORED
from trainer.models.moe import Dispatched
from trainer.ranks.mesh import local_part


def python_rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """torchtitan/models/norms.py, until #985: the input is kept in fp32, the result in x's dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + norm.eps)
    return scaled.type_as(x) * norm.weight


def composite_rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """at::rms_norm on CUDA before torch 2.9 (ATen/native/layer_norm.cpp): input and result are kept in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(norm.eps))
    return (wide * scale * norm.weight).type_as(x)


def llama_attention(attention: nn.Module, x_BLD: Tensor, rotations: tuple[Tensor]) -> Tensor:
    """torchtitan/models/llama/model.py: q and k are rotated as complex numbers. `rotations` [L, 1, P], complex."""
    (angles,) = rotations
    q, k, v = (linear(x_BLD) for linear in (attention.wq, attention.wk, attention.wv))
    q, k, v = (each.unflatten(-1, (-1, attention.head_dim)) for each in (q, k, v))
    pairs = [torch.view_as_complex(each.float().unflatten(-1, (-1, 2))) for each in (q, k)]
    wide_q, wide_k = (torch.view_as_real(each * angles).flatten(-2) for each in pairs)
    del pairs
    return _attend(attention, wide_q.type_as(q), wide_k.type_as(k), v)


def qwen_attention(attention: nn.Module, x_BLD: Tensor, rotations: tuple[Tensor]) -> Tensor:
    """torchtitan/models/qwen3/model/model.py: q and k are normalized, then rotated in x's dtype.

    `rotations` [L, 2·H]: cosine and sine of both halves.
    """
    q, k, v = (linear(x_BLD) for linear in (attention.wq, attention.wk, attention.wv))
    q, k, v = (each.unflatten(-1, (-1, attention.head_dim)) for each in (q, k, v))
    q, k = attention.q_norm(q), attention.k_norm(k)
    cos, sin = (part.unsqueeze(-2).to(q.dtype) for part in rotations[0].chunk(2, dim=-1))
    return _attend(attention, *((each * cos) + (_rotate_halves(each) * sin) for each in (q, k)), v)


def grouped_qwen_attention(attention: nn.Module, x_BLD: Tensor, rotations: tuple[Tensor]) -> Tensor:
    """The same in v0.2.2: keys and values are not repeated for the queries that share them."""
    q, k, v = (linear(x_BLD) for linear in (attention.wq, attention.wk, attention.wv))
    q, k, v = (each.unflatten(-1, (-1, attention.head_dim)) for each in (q, k, v))
    q, k = attention.q_norm(q), attention.k_norm(k)
    cos, sin = (part.unsqueeze(-2).to(q.dtype) for part in rotations[0].chunk(2, dim=-1))
    q, k = ((each * cos) + (_rotate_halves(each) * sin) for each in (q, k))
    out_BLNH = attention.inner_attention(q, k, v)
    return attention.wo(out_BLNH.contiguous().flatten(-2))


def llama_freqs_cis(rope: nn.Module, positions: Tensor) -> Tensor:
    """Its buffer: [L, 1, P], which FSDP casts to no other dtype."""
    angles = (positions.float().unsqueeze(-1) * rope.frequencies_P).unsqueeze(-2)
    return torch.polar(torch.ones_like(angles), angles)


def qwen_rope_cache(rope: nn.Module, positions: Tensor) -> Tensor:
    """Its buffer: [L, 2·H] in fp32."""
    angles = positions.float().unsqueeze(-1) * rope.frequencies_P
    angles = torch.cat((angles, angles), dim=-1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rotate_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def scatter_added_experts(moe: nn.Module, x_BLD: Tensor) -> Tensor:
    """torchtitan/models/common/moe.py and token_dispatcher.py in mid-2026: rows are not padded (#2774).

    The router is in fp32 (#2389); rows are weighted in fp32, and added up in the model's dtype.
    """
    x_TD = x_BLD.flatten(0, 1)
    ids_TK, weights_TK = moe.router(x_TD, moe.expert_bias)
    order_N = ids_TK.flatten().argsort(stable=True)
    tokens_N = order_N // ids_TK.shape[1]
    num_experts = len(moe.expert_bias)
    chosen_TE = torch.zeros(len(x_TD), num_experts, dtype=torch.bool).scatter(1, ids_TK, True)
    ends_E = chosen_TE.sum(dim=0).cumsum(dim=0, dtype=torch.int32)
    out_ND = moe.dispatch.compute(moe.experts, Dispatched(x_TD[tokens_N], ends_E, order_N, order_N))
    weighted_ND = (out_ND.float() * weights_TK.flatten()[order_N].unsqueeze(-1)).type_as(out_ND)
    index_ND = tokens_N.unsqueeze(-1).expand_as(weighted_ND)
    out_BLD = torch.zeros_like(x_TD).scatter_add(0, index_ND, weighted_ND).view_as(x_BLD)
    return out_BLD if moe.shared_experts is None else moe.shared_experts(x_BLD) + out_BLD


def _attend(attention: nn.Module, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
    repeats = q_BLNH.shape[2] // k_BLKH.shape[2]
    k, v = (_repeated(each, repeats) for each in (k_BLKH, v_BLKH))
    out_BLNH = attention.inner_attention(q_BLNH, k, v)
    return attention.wo(out_BLNH.contiguous().flatten(-2))


def _repeated(x_BLKH: Tensor, repeats: int) -> Tensor:
    if repeats == 1:
        return x_BLKH
    batch, length, heads, dim = x_BLKH.shape
    return x_BLKH[:, :, :, None, :].expand(batch, length, heads, repeats, dim).reshape(batch, length, -1, dim)


class LossOfLogits:
    """A part's forward: F.cross_entropy of its logits in fp32, as DTensors if they are sharded over TP.

    In chunks (#996) the loss reads the logits piece by piece. Kept are those of all microbatches of a step.
    """

    def __init__(self, forward: Callable[..., Tensor], tp_mesh: DeviceMesh | None, build: HistoricalBuild):
        self._forward, self._tp_mesh, self._then = forward, tp_mesh, build
        self._kept: list[Tensor] = []
        self.cross_entropy = _cross_entropy

    def __call__(self, x: Tensor, positions: Tensor, targets: Tensor, **documents: Tensor) -> Tensor:
        logits = self._forward(x, positions, **documents)
        if self._then.has_wide_logits:
            logits = logits.float()
        if len(self._kept) == self._then.num_logits_kept:
            self._kept.clear()
        if self._then.num_logits_kept:
            self._kept.append(logits)
        if self._tp_mesh is not None:
            logits = DTensor.from_local(logits, self._tp_mesh, [Shard(-1)], run_check=False)
        if not (chunks := self._then.loss_chunks):
            return local_part(self.cross_entropy(logits, targets))
        pairs = zip(logits.chunk(chunks, dim=1), targets.chunk(chunks, dim=1), strict=True)
        return sum(local_part(self.cross_entropy(*pair)) for pair in pairs)


def _cross_entropy(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    return F.cross_entropy(
        logits_BLV.flatten(0, 1).float(), targets_BL.flatten(0, 1), reduction="sum", ignore_index=IGNORED
    )
