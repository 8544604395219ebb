"""Llama 4's text model in plain PyTorch: Llama 3's blocks, with layers that rotate and layers without positions.

Shape letters: B batch, L tokens (of the sequence shard at hand), D model dim, N query heads, K key/value heads, H head
dim. N and K are what this rank holds, so they are inferred with -1.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.families.base import GroupedQuery, ModelArgs
from converters.families.llama4 import Llama4Args, block
from trainer.models.decoder import CausalAttention, Transformer
from trainer.models.rope import RotaryAngles, rotate


class PositionFeatures(NamedTuple):
    """Values that depend on the positions of tokens and that layers need."""

    rotations: Tensor
    temperatures: Tensor | None  # factors of q in the layers without rotation, fp32 [L, 1, 1] or [B, L, 1, 1]


class Positions(nn.Module):
    """Positions [L] or [B, L] → PositionFeatures."""

    def __init__(self, angles: RotaryAngles, args: Llama4Args):
        super().__init__()
        self.angles, self.temperature, self.temperature_length = angles, args.temperature, args.temperature_length

    def forward(self, positions: Tensor) -> PositionFeatures:
        temperatures = None
        if self.temperature is not None:
            temperatures = temperature_factors(positions, self.temperature, self.temperature_length)
        return PositionFeatures(self.angles(positions), temperatures)


def temperature_factors(positions: Tensor, temperature: float, length: int) -> Tensor:
    """Factors of q, fp32 [..., 1, 1] (arXiv 2501.19399): GroupedQuery.temperature has the formula.

    The order of operations is that of transformers (modeling_llama4.py), for bit-equal results.
    """
    factors = torch.log1p(torch.floor((positions.float() + 1.0) / length)) * temperature + 1.0
    return factors[..., None, None]


class InterleavedAttention(nn.Module):
    """Grouped-query attention around `inner_attention(q_BLNH, k_BLKH, v_BLKH) -> out_BLNH`.

    Either q and k are rotated, and then normed if `norms_qk`; or they have no positions, and q gets a temperature.
    """

    def __init__(self, args: ModelArgs, kind: GroupedQuery):
        super().__init__()
        self.head_dim, self.norm_eps, self.kind = args.head_dim, args.norm_eps, kind
        self.wq = nn.Linear(args.dim, args.num_heads * args.head_dim, bias=args.attention_bias)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wo = nn.Linear(args.num_heads * args.head_dim, args.dim, bias=args.attention_bias)
        self.inner_attention: nn.Module = CausalAttention(kind)

    def forward(self, x_BLD: Tensor, rotations: PositionFeatures, **mask: Any) -> Tensor:
        q_BLNH = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLKH = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLKH = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        if self.kind.rotates:
            q_BLNH, k_BLKH = rotate(q_BLNH, rotations.rotations), rotate(k_BLKH, rotations.rotations)
        if self.kind.norms_qk:
            q_BLNH, k_BLKH = self._norm(q_BLNH), self._norm(k_BLKH)
        if self.kind.temperature is not None:
            assert rotations.temperatures is not None
            q_BLNH = (q_BLNH * rotations.temperatures).type_as(q_BLNH)
        out_BLNH = self.inner_attention(q_BLNH, k_BLKH, v_BLKH, **mask)
        out_BLD: Tensor = self.wo(out_BLNH.flatten(-2))
        return out_BLD

    def _norm(self, x_BLNH: Tensor) -> Tensor:
        """Each head divided by its root mean square, in fp32."""
        return F.rms_norm(x_BLNH.float(), (self.head_dim,), eps=self.norm_eps).type_as(x_BLNH)


def build_model(args: ModelArgs) -> Transformer:
    assert isinstance(args, Llama4Args)
    model = Transformer(args, InterleavedAttention, block=block)
    assert isinstance(model.rope, RotaryAngles)
    model.rope = Positions(model.rope, args)
    return model
