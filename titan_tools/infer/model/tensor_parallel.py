"""The three modules that differ when weights are sliced: explicit collectives on plain local tensors.

Two sums per layer (after wo and w2), one for the embedding, one all-gather for the logits. Every rank ends up
with the same bytes of logits, so each can choose the next token by itself.

Shape letters: B batch, L tokens, D model dim, V vocabulary, R the vocabulary rows of one rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from converters.layout import chunk_bounds

_GATHERED_BYTES = 256 << 10  # of all ranks together; beyond, all-reduce moves less


class SummedLinear(nn.Module):
    """A linear layer whose input features lie on several ranks: each multiplies its own, the sum is the output."""

    def __init__(self, linear: nn.Linear, *, tp: int):
        super().__init__()
        self.weight, self.tp = linear.weight, tp

    def forward(self, x: Tensor) -> Tensor:
        return sum_over_ranks(F.linear(x, self.weight), tp=self.tp)


class SlicedEmbedding(nn.Module):
    """An embedding whose rows lie on several ranks: a rank answers for its own tokens, zero for the others."""

    def __init__(self, embedding: nn.Embedding, *, tp: int, rank: int):
        super().__init__()
        self.weight = embedding.weight
        self.start, self.num_rows = chunk_bounds(embedding.num_embeddings, tp, rank)
        self.tp = tp

    def forward(self, tokens_BL: Tensor) -> Tensor:
        rows_BL = tokens_BL - self.start
        elsewhere_BL = (rows_BL < 0) | (rows_BL >= self.num_rows)
        if self.num_rows:
            x_BLD = F.embedding(rows_BL.masked_fill(elsewhere_BL, 0), self.weight)
            x_BLD = x_BLD.masked_fill(elsewhere_BL.unsqueeze(-1), 0)
        else:  # more ranks than blocks of rows
            x_BLD = self.weight.new_zeros(*tokens_BL.shape, self.weight.shape[1])
        return sum_over_ranks(x_BLD, tp=self.tp)


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


def sum_over_ranks(part: Tensor, *, tp: int) -> Tensor:
    """The sum of every rank's `part`, which may be overwritten; the same bytes on all ranks.

    What is small is gathered and summed here: gloo's all-reduce takes two rounds of messages, a gather one, and when
    decoding on a CPU it is their number that costs.
    """
    if part.is_cuda or tp * part.nbytes > _GATHERED_BYTES:
        dist.all_reduce(part)
        return part
    parts = [torch.empty_like(part) for _ in range(tp)]
    dist.all_gather(parts, part)
    return torch.stack(parts).sum(dim=0)
