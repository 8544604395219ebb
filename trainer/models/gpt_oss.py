"""GPT-OSS in plain PyTorch: Llama 3's blocks, with attention that has windows, sinks and biases, and rotates halves.

Shape letters: B batch, L tokens (of the sequence shard at hand), D model dim, N query heads, K key/value heads, H head
dim. N and K are what this rank holds, so they are inferred with -1.
"""

from typing import Any

import torch
from torch import Tensor, nn

from converters.families.base import GroupedQuery, ModelArgs
from converters.families.gpt_oss import block
from trainer.models.decoder import CausalAttention, Transformer
from trainer.models.qwen3 import rotate_halves


class SinkAttention(nn.Module):
    """Grouped-query attention around `inner_attention(q_BLNH, k_BLKH, v_BLKH, sinks_N=…) -> out_BLNH`.

    A head's sink is the score of one more column of its softmax, which has no value: it lowers the other weights.
    """

    def __init__(self, args: ModelArgs, kind: GroupedQuery):
        super().__init__()
        self.head_dim, self.kind = args.head_dim, kind
        self.wq = nn.Linear(args.dim, args.num_heads * args.head_dim, bias=args.attention_bias)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wo = nn.Linear(args.num_heads * args.head_dim, args.dim, bias=args.attention_bias)
        self.sinks = nn.Parameter(torch.empty(args.num_heads))
        self.inner_attention: nn.Module = CausalAttention(kind)

    def forward(self, x_BLD: Tensor, rotations: Tensor, **mask: Any) -> Tensor:
        q_BLNH = rotate_halves(self.wq(x_BLD).unflatten(-1, (-1, self.head_dim)), rotations)
        k_BLKH = rotate_halves(self.wk(x_BLD).unflatten(-1, (-1, self.head_dim)), rotations)
        v_BLKH = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        out_BLNH = self.inner_attention(q_BLNH, k_BLKH, v_BLKH, sinks_N=self.sinks, **mask)
        out_BLD: Tensor = self.wo(out_BLNH.flatten(-2))
        return out_BLD


def build_model(args: ModelArgs) -> Transformer:
    return Transformer(args, SinkAttention, rotations_stacked_on=0, block=block)
