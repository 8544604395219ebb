"""Grouped-query attention in plain PyTorch, and the causal attention inside of it.

Shape letters: B batch, L tokens (of this sequence shard), D model dim, N query heads, K key/value heads, H head dim.
N and K are what this rank holds, so they are inferred with -1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.families.args import DecoderArgs
from converters.families.blocks import GroupedQuery, Rope, Temperature
from trainer.models.norms import make_norm
from trainer.models.rope import PositionFeatures, position_features, rotate_first

PLAIN = GroupedQuery(rope=None)  # causal attention of given q and k to all tokens


def kind_of(layer: nn.Module) -> GroupedQuery:
    """The window, chunk and sinks of a layer's attention: its `kind`, or PLAIN if the module of a family has none."""
    kind = getattr(layer.attention, "kind", PLAIN)
    assert isinstance(kind, GroupedQuery)
    return kind


def to_one_width(*tensors: Tensor) -> list[Tensor]:
    """Zeros behind the last dim of those that are narrower than the widest, for kernels that take one width.

    Zeros change neither the scores of q and k nor the other features of the result.
    """
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def first_features(x: Tensor, width: int) -> Tensor:
    """The first `width` of the last dim."""
    return x if x.shape[-1] == width else x[..., :width]


class CausalAttention(nn.Module):
    """The default inner attention: causal SDPA over the given tokens, the first of which has position 0.

    With a window, a chunk or sinks it makes a mask of L × L numbers; `trainer.build` replaces it if there is one.
    """

    def __init__(self, kind: GroupedQuery = PLAIN):
        super().__init__()
        self.kind = kind

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        scale: float | None = None,
        *,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        if self.kind.needs_mask:
            return attend_densely(q_BLNH, k_BLKH, v_BLKH, self.kind, scale, sinks_N)
        q_BNLH, k_BKLH, v_BKLH = q_BLNH.transpose(1, 2), k_BLKH.transpose(1, 2), v_BLKH.transpose(1, 2)
        grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
        if not q_BNLH.is_cuda:  # there unequal widths would be multiplied without a fused kernel
            q_BNLH, k_BKLH, v_BKLH = to_one_width(q_BNLH, k_BKLH, v_BKLH)
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BKLH, v_BKLH, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return first_features(out_BNLH, v_BLKH.shape[-1]).transpose(1, 2)


def attend_densely(
    q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, kind: GroupedQuery, scale: float | None, sinks_N: Tensor | None
) -> Tensor:
    """Attention with an additive mask. A sink is the score of one more key, which is 0, as is its value."""
    places_L = torch.arange(q_BLNH.shape[1], device=q_BLNH.device)
    sees_LL = places_L[:, None] >= places_L
    if kind.window is not None:
        sees_LL &= places_L[:, None] - places_L < kind.window
    if kind.chunk is not None:
        sees_LL &= places_L[:, None] // kind.chunk == places_L // kind.chunk
    bias_NLL = torch.zeros_like(sees_LL, dtype=q_BLNH.dtype).masked_fill(~sees_LL, float("-inf"))
    if sinks_N is not None:
        sinks_NL1 = sinks_N.type_as(q_BLNH)[:, None, None].expand(-1, len(places_L), 1)
        bias_NLL = torch.cat((bias_NLL.expand(len(sinks_N), -1, -1), sinks_NL1), dim=-1)
        k_BLKH, v_BLKH = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k_BLKH, v_BLKH))
    q_BNLH, k_BKLH, v_BKLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    out_BNLH = F.scaled_dot_product_attention(
        q_BNLH, k_BKLH, v_BKLH, attn_mask=bias_NLL, scale=scale, enable_gqa=grouped
    )
    return out_BNLH.transpose(1, 2)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention around `inner_attention(q_BLNH, k_BLKH, v_BLKH) -> out_BLNH`, as `kind` describes it.

    Replace the `inner_attention` module for anything other than causal attention. It also takes `scale`, the factor of
    the scores, by position or by name; and by name `sinks_N`, a score for each head of one more column of its softmax,
    which has no value, and the `mask` that `Transformer.make_mask` has made.
    """

    def __init__(self, args: DecoderArgs, kind: GroupedQuery, features: Sequence[Rope | Temperature] = ()):
        """`features`: what `Positions` returns values of; by default those of this attention alone."""
        super().__init__()
        features = features or position_features([kind])
        self.head_dim, self.kind = args.head_dim, kind
        self.rope_number = -1 if kind.rope is None else features.index(kind.rope)
        self.temperature_number = -1 if kind.temperature is None else features.index(kind.temperature)
        self.wq = nn.Linear(args.dim, args.num_heads * args.head_dim, bias=kind.qkv_bias)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=kind.qkv_bias)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=kind.qkv_bias)
        self.wo = nn.Linear(args.num_heads * args.head_dim, args.dim, bias=kind.out_bias)
        norm, is_learned = kind.qk_norm, kind.qk_norm is not None and kind.qk_norm.has_weight
        self.q_norm, self.k_norm = (make_norm(norm if is_learned else None, args.head_dim) for _ in range(2))
        self.norm_of_rotated = make_norm(None if is_learned else norm, args.head_dim)
        if kind.has_sinks:
            self.sinks = nn.Parameter(torch.empty(args.num_heads))
        self.inner_attention: nn.Module = CausalAttention(kind)

    def forward(self, x_BLD: Tensor, rotations: PositionFeatures, **others: Any) -> Tensor:
        """`others` are passed to the inner attention."""
        q_BLNH = self.q_norm(self.wq(x_BLD).unflatten(-1, (-1, self.head_dim)))
        k_BLKH = self.k_norm(self.wk(x_BLD).unflatten(-1, (-1, self.head_dim)))
        v_BLKH = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        if self.kind.rope is not None:
            angles = rotations[self.rope_number]
            q_BLNH, k_BLKH = (rotate_first(each, angles, self.kind.rope) for each in (q_BLNH, k_BLKH))
        q_BLNH, k_BLKH = self.norm_of_rotated(q_BLNH), self.norm_of_rotated(k_BLKH)
        if self.kind.temperature is not None:
            q_BLNH = (q_BLNH * rotations[self.temperature_number]).type_as(q_BLNH)
        if self.kind.scale is not None:
            others["scale"] = self.kind.scale
        if self.kind.has_sinks:
            others["sinks_N"] = self.sinks
        out_BLNH = self.inner_attention(q_BLNH, k_BLKH, v_BLKH, **others)
        out_BLD: Tensor = self.wo(out_BLNH.flatten(-2))
        return out_BLD
