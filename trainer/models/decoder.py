"""The decoder of every family, in plain PyTorch, built from the blocks that the family describes.

Tensor parallelism, FSDP, pipeline stages, context parallelism and cached inference are applied from outside.

Shape letters: B batch, L tokens (of this sequence shard), D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from converters.families.args import DecoderArgs
from converters.families.blocks import Block, Ends, Experts, Latent, Rope, Temperature, dense_block, plain_ends
from trainer.models.attention import GroupedQueryAttention
from trainer.models.feed_forward import FeedForward
from trainer.models.latent_attention import LatentAttention
from trainer.models.moe import MoE
from trainer.models.norms import make_norm
from trainer.models.rope import PositionFeatures, Positions, position_features
from trainer.models.units import ModelPart, Unit


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each with its norms, added to the residual stream."""

    def __init__(self, args: DecoderArgs, block: Block, features: Sequence[Rope | Temperature] = ()):
        """`features`: as of GroupedQueryAttention."""
        super().__init__()
        if isinstance(block.attention, Latent):
            self.attention: nn.Module = LatentAttention(args, block.attention, features)
        else:
            self.attention = GroupedQueryAttention(args, block.attention, features)
        self.has_experts = isinstance(block.feed_forward, Experts)
        if isinstance(block.feed_forward, Experts):
            self.moe = MoE(args.dim, block.feed_forward)
        else:
            self.feed_forward = FeedForward(args.dim, block.feed_forward)
        self.residual = block.residual
        self.attention_norm = make_norm(block.before, args.dim)
        self.ffn_norm = make_norm(None if block.parallel else block.before, args.dim)
        self.attention_post_norm, self.ffn_post_norm = (make_norm(block.after, args.dim) for _ in range(2))

    def forward(self, x_BLD: Tensor, rotations: PositionFeatures, **mask: Any) -> Tensor:
        h_BLD: Tensor = x_BLD + self._attend(self.attention_norm(x_BLD), rotations, **mask)
        return h_BLD + self._feed_forward(self.ffn_norm(h_BLD))

    def _attend(self, x_BLD: Tensor, rotations: PositionFeatures, **mask: Any) -> Tensor:
        return self._scaled(self.attention_post_norm(self.attention(x_BLD, rotations=rotations, **mask)))

    def _feed_forward(self, x_BLD: Tensor) -> Tensor:
        feed_forward = self.moe if self.has_experts else self.feed_forward
        return self._scaled(self.ffn_post_norm(feed_forward(x_BLD)))

    def _scaled(self, x_BLD: Tensor) -> Tensor:
        return x_BLD if self.residual == 1.0 else x_BLD * self.residual


class ParallelBlock(TransformerBlock):
    """One layer whose attention and feed-forward read the same."""

    def forward(self, x_BLD: Tensor, rotations: PositionFeatures, **mask: Any) -> Tensor:
        read_BLD = self.attention_norm(x_BLD)
        return x_BLD + self._attend(read_BLD, rotations, **mask) + self._feed_forward(read_BLD)


class Transformer(ModelPart):
    """The whole model, or a pipeline stage of it: modules that are None, and removed layers, are skipped."""

    def __init__(
        self,
        args: DecoderArgs,
        block: Callable[[DecoderArgs, int], Block] = dense_block,  # the family's
        ends: Ends | None = None,  # None: an RMSNorm behind the last layer
    ):
        super().__init__()
        self.args, ends = args, ends or plain_ends(args)
        self.embedding_scale, self.logit_scale = ends.embedding_scale, ends.logit_scale
        # (documents or None, number of tokens here) → what inner attentions take as `mask`; set if one takes it
        self.make_mask: Callable[..., Any] | None = None
        blocks = [block(args, n) for n in range(args.num_layers)]
        features = position_features([each.attention for each in blocks])
        self.rope: nn.Module = Positions(features)
        self.tok_embeddings: nn.Module | None = nn.Embedding(args.vocab_size, args.dim)
        kinds = [ParallelBlock if each.parallel else TransformerBlock for each in blocks]
        layers = [kind(args, each, features) for kind, each in zip(kinds, blocks, strict=True)]
        self.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})
        self.norm: nn.Module | None = make_norm(ends.norm, args.dim)
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
        h_BLD = self.embed(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, rotations, **mask)
        if self.norm is not None:
            h_BLD = self.norm(h_BLD)
            if self.logit_scale != 1.0:  # here, where the output stays a plain linear layer
                h_BLD = h_BLD * self.logit_scale
        return self.output(h_BLD) if self.output is not None else h_BLD

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """The embeddings of tokens, scaled."""
        assert self.tok_embeddings is not None
        x_BLD: Tensor = self.tok_embeddings(tokens_BL)
        if self.embedding_scale == 1.0:
            return x_BLD
        return x_BLD * torch.tensor(self.embedding_scale, dtype=x_BLD.dtype, device="cpu").item()
