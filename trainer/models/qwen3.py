"""Qwen 3 in plain PyTorch: Llama 3's blocks, with attention that norms each head of q and k and rotates halves.

Shape letters: B batch, L tokens (of the sequence shard at hand), D model dim, N query heads, K key/value heads, H head
dim, P = H/2 rotation pairs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from converters.families.base import GroupedQuery, ModelArgs
from converters.families.qwen3 import block
from trainer.models.decoder import PLAIN, CausalAttention, Transformer, refuse_other_kinds


class QKNormAttention(nn.Module):
    """Grouped-query attention around `inner_attention(q_BLNH, k_BLKH, v_BLKH) -> out_BLNH`, with q and k rotated.

    The norms are over the head dim, before the rotation; all heads of a layer share one weight.
    """

    def __init__(self, args: ModelArgs, kind: GroupedQuery = PLAIN):
        super().__init__()
        refuse_other_kinds(kind)
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.num_heads * args.head_dim, bias=args.attention_bias)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wo = nn.Linear(args.num_heads * args.head_dim, args.dim, bias=args.attention_bias)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.inner_attention: nn.Module = CausalAttention()

    def forward(self, x_BLD: Tensor, rotations: Tensor, **mask: Any) -> Tensor:
        q_BLNH = self.q_norm(self.wq(x_BLD).unflatten(-1, (-1, self.head_dim)))
        k_BLKH = self.k_norm(self.wk(x_BLD).unflatten(-1, (-1, self.head_dim)))
        v_BLKH = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLNH, k_BLKH = rotate_halves(q_BLNH, rotations), rotate_halves(k_BLKH, rotations)
        out_BLNH = self.inner_attention(q_BLNH, k_BLKH, v_BLKH, **mask)
        out_BLD: Tensor = self.wo(out_BLNH.flatten(-2))
        return out_BLD


def rotate_halves(x_BLNH: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the pairs (0, P), (1, P+1), … of each head, in fp32, and return x's dtype.

    `rotations` are those of `RotaryAngles`, stacked on 0. Only the order of the pairs differs from Llama's rotation.
    """
    first, second = x_BLNH.float().chunk(2, dim=-1)
    cos, sin = rotations.unbind(0)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BLNH)


def build_model(args: ModelArgs) -> Transformer:
    return Transformer(args, QKNormAttention, rotations_stacked_on=0, block=block)
