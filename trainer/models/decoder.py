"""The decoder of every family, in plain PyTorch, and Llama's attention. Other families pass theirs to `Transformer`.

Tensor parallelism, FSDP, pipeline stages, context parallelism and cached inference are applied from outside.

Shape letters: B batch, L tokens (of this sequence shard), D model dim, N query heads, K key/value heads,
H head dim, V vocabulary. N and K are what this rank holds, so they are inferred with -1.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.common.errors import UnsupportedError
from converters.families.base import Block, Experts, GroupedQuery, Latent, ModelArgs, dense_block
from trainer.models.moe import MoE
from trainer.models.rope import RotaryAngles, rotate
from trainer.models.units import ModelPart, Unit

PLAIN = GroupedQuery()


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


def refuse_other_kinds(kind: Latent | GroupedQuery) -> None:
    """Raise UnsupportedError unless a family's `block` describes plain attention."""
    if kind != PLAIN:
        raise UnsupportedError(
            f"this attention is plain, and the family's `block` describes {kind}",
            hint="pass Transformer an attention that computes it, as trainer/models/gpt_oss and llama4 do",
        )


class Attention(nn.Module):
    """Grouped-query attention around `inner_attention(q_BLNH, k_BLKH, v_BLKH) -> out_BLNH`, with q and k rotated.

    Replace the `inner_attention` module for anything other than causal attention. It also takes `scale`, the factor of
    the scores, by position or by name; and by name `sinks_N`, and the `mask` that `Transformer.make_mask` has made.
    """

    def __init__(self, args: ModelArgs, kind: Latent | GroupedQuery = PLAIN):
        super().__init__()
        refuse_other_kinds(kind)
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.num_heads * args.head_dim, bias=args.attention_bias)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * args.head_dim, bias=args.attention_bias)
        self.wo = nn.Linear(args.num_heads * args.head_dim, args.dim, bias=args.attention_bias)
        self.inner_attention: nn.Module = CausalAttention()

    def forward(self, x_BLD: Tensor, rotations: Tensor, **mask: Any) -> Tensor:
        q_BLNH = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLKH = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLKH = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        out_BLNH = self.inner_attention(rotate(q_BLNH, rotations), rotate(k_BLKH, rotations), v_BLKH, **mask)
        out_BLD: Tensor = self.wo(out_BLNH.flatten(-2))
        return out_BLD


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_hidden, bias=args.mlp_bias)
        self.w2 = nn.Linear(args.ffn_hidden, args.dim, bias=args.mlp_bias)
        self.w3 = nn.Linear(args.dim, args.ffn_hidden, bias=args.mlp_bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        out_BLD: Tensor = self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))
        return out_BLD


class TransformerBlock(nn.Module):
    """One pre-norm layer: attention and feed-forward, each added to the residual stream."""

    def __init__(self, args: ModelArgs, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.feed_forward = FeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x_BLD: Tensor, rotations: Tensor, **mask: Any) -> Tensor:
        h_BLD: Tensor = x_BLD + self.attention(self.attention_norm(x_BLD), rotations=rotations, **mask)
        out_BLD: Tensor = h_BLD + self.feed_forward(self.ffn_norm(h_BLD))
        return out_BLD


class ExpertsBlock(nn.Module):
    """One pre-norm layer with a mixture of experts as its feed-forward."""

    def __init__(self, args: ModelArgs, attention: nn.Module, experts: Experts):
        super().__init__()
        self.attention = attention
        self.moe = MoE(args.dim, experts)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x_BLD: Tensor, rotations: Tensor, **mask: Any) -> Tensor:
        h_BLD: Tensor = x_BLD + self.attention(self.attention_norm(x_BLD), rotations=rotations, **mask)
        out_BLD: Tensor = h_BLD + self.moe(self.ffn_norm(h_BLD))
        return out_BLD


def make_layer(args: ModelArgs, attention: nn.Module, block: Block) -> nn.Module:
    """The layer that a family's `block` describes, around `attention`."""
    if isinstance(block.feed_forward, Experts):
        return ExpertsBlock(args, attention, block.feed_forward)
    return TransformerBlock(args, attention)


class Transformer(ModelPart):
    """The whole model, or a pipeline stage of it: modules that are None, and removed layers, are skipped."""

    def __init__(
        self,
        args: ModelArgs,
        make_attention: Callable[[ModelArgs, Any], nn.Module] = Attention,  # of the numbers and `Block.attention`
        *,
        rotations_stacked_on: int = -1,  # the layout that the attention expects
        block: Callable[[ModelArgs, int], Block] = dense_block,  # the family's
    ):
        super().__init__()
        self.args = args
        # (documents or None, number of tokens here) → what inner attentions take as `mask`; set if one takes it
        self.make_mask: Callable[..., Any] | None = None
        blocks = [block(args, n) for n in range(args.num_layers)]
        latent = blocks[0].latent
        width = latent.rotary_dim if latent else args.head_dim
        self.rope: nn.Module = RotaryAngles(args, stacked_on=rotations_stacked_on, width=width)
        self.tok_embeddings: nn.Module | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict(
            {str(n): make_layer(args, make_attention(args, kind.attention), kind) for n, kind in enumerate(blocks)}
        )
        self.norm: nn.Module | None = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output: nn.Module | None = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie()

    def units(self) -> list[Unit]:
        has_shared = self.args.tied and self.output is not None
        units = [Unit(f"layers.{number}", layer, number=int(number)) for number, layer in self.layers.items()]
        if self.tok_embeddings is not None:
            units.insert(0, Unit("tok_embeddings", self.tok_embeddings, "last" if has_shared else "first"))
        ends = (("norm", self.norm), ("output", self.output))
        return units + [Unit(name, module, "last") for name, module in ends if module is not None]

    def tie(self) -> None:
        """Make a tied output share the embedding's parameter.

        Call it again after parameters were replaced (leaving the meta device, sharding).
        """
        if self.args.tied and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Tokens [B, L] (or hidden states [B, L, D] in a later stage) → logits [B, L, V] (or hidden states).

        `positions` [L] or [B, L] are the tokens' positions in their sequence; None means 0 … L-1. `documents` [B, S]
        numbers the documents of the whole sequences, of which these tokens may be shards; attention then keeps to them.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rotations = self.rope(positions)
        assert documents is None or self.make_mask is not None, "the model was not built for attention within documents"
        mask = {} if self.make_mask is None else {"mask": self.make_mask(documents, positions.shape[-1])}
        h_BLD = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, rotations, **mask)
        if self.norm is not None:
            h_BLD = self.norm(h_BLD)
        return self.output(h_BLD) if self.output is not None else h_BLD
