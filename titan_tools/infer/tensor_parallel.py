"""The three modules that differ when weights are sliced: explicit collectives on plain local tensors.

Two all-reduces per layer (after wo and w2), one for the embedding, one all-gather for the logits. Every rank ends up
with the same bytes of logits, so each can choose the next token by itself.

Shape letters: B batch, L tokens, D model dim, V vocabulary, R the vocabulary rows of one rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from converters.layout import chunk_bounds


class SummedLinear(nn.Module):
    """A linear layer whose input features lie on several ranks: each multiplies its own, the sum is the output."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        dist.all_reduce(out)
        return out


class SlicedEmbedding(nn.Module):
    """An embedding whose rows lie on several ranks: a rank answers for its own tokens, zero for the others."""

    def __init__(self, embedding: nn.Embedding, *, tp: int, rank: int):
        super().__init__()
        self.weight = embedding.weight
        self.start, self.num_rows = chunk_bounds(embedding.num_embeddings, tp, rank)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        rows_BL = tokens_BL - self.start
        elsewhere_BL = (rows_BL < 0) | (rows_BL >= self.num_rows)
        if self.num_rows:
            x_BLD = F.embedding(rows_BL.masked_fill(elsewhere_BL, 0), self.weight)
            x_BLD = x_BLD.masked_fill(elsewhere_BL.unsqueeze(-1), 0)
        else:  # more ranks than blocks of rows
            x_BLD = self.weight.new_zeros(*tokens_BL.shape, self.weight.shape[1])
        dist.all_reduce(x_BLD)
        return x_BLD


class GatheredOutput(nn.Module):
    """An output layer whose vocabulary lies on several ranks: each computes its logits, all get all of them."""

    def __init__(self, linear: nn.Linear, *, tp: int):
        super().__init__()
        self.weight = linear.weight
        self.vocab_size, self.tp = linear.out_features, tp

    def forward(self, x_BD: Tensor) -> Tensor:
        _, num_rows = chunk_bounds(self.vocab_size, self.tp, 0)
        own_BR = F.linear(x_BD, self.weight)
        own_BR = F.pad(own_BR, (0, num_rows - own_BR.shape[-1]))  # the last ranks may have fewer rows
        parts = [torch.empty_like(own_BR) for _ in range(self.tp)]
        dist.all_gather(parts, own_BR)
        return torch.cat(parts, dim=-1)[..., : self.vocab_size]
