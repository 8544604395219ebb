"""The three modules that differ when weights are sliced: explicit collectives on plain local tensors.

Two sums per layer (after wo and w2), one for the embedding, one all-gather for the logits. Every rank ends up
with the same bytes of logits, so each can choose the next token by itself.

Shape letters: B batch, L tokens, D model dim, V vocabulary, R the vocabulary rows of one rank.
"""

from typing import Protocol

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from converters.layout import chunk_bounds

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
_GATHERED_BYTES = 256 << 10  # of all ranks together; beyond, all-reduce moves less


class Collectives(Protocol):
    """How partial results come together: the same bytes on all ranks."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's `part`, which may be overwritten."""

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's `part`, joined along the last dim."""


class ProcessGroupCollectives:
    """Through torch's process group."""

    def __init__(self, tp: int):
        self.tp = tp

    def sum(self, part: Tensor) -> Tensor:
        """What is small is gathered and summed here, on a CPU.

        gloo's all-reduce takes two rounds of messages, a gather one, and in decoding it is their number that costs.
        """
        if part.is_cuda or self.tp * part.nbytes > _GATHERED_BYTES:
            dist.all_reduce(part)
            return part
        return self._all(part).sum(dim=0)

    def gather(self, part: Tensor) -> Tensor:
        return self._all(part).movedim(0, -2).flatten(-2)

    def _all(self, part: Tensor) -> Tensor:
        """The parts of all ranks, [tp, …]."""
        parts = part.new_empty(self.tp * part.shape[0], *part.shape[1:])
        _all_gather_single(parts, part)
        return parts.view(self.tp, *part.shape)


class SummedLinear(nn.Module):
    """A linear layer whose input features lie on several ranks: each multiplies its own, the sum is the output.

    The bias is whole on every rank, and added to the sum.
    """

    def __init__(self, linear: nn.Linear, *, tp: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.collectives: Collectives = ProcessGroupCollectives(tp)

    def forward(self, x: Tensor) -> Tensor:
        out = self.collectives.sum(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class SlicedEmbedding(nn.Module):
    """An embedding whose rows lie on several ranks: a rank answers for its own tokens, zero for the others."""

    def __init__(self, embedding: nn.Embedding, *, tp: int, rank: int):
        super().__init__()
        self.weight = embedding.weight
        self.start, self.num_rows = chunk_bounds(embedding.num_embeddings, tp, rank)
        self.collectives: Collectives = ProcessGroupCollectives(tp)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        rows_BL = tokens_BL - self.start
        elsewhere_BL = (rows_BL < 0) | (rows_BL >= self.num_rows)
        if self.num_rows:
            x_BLD = F.embedding(rows_BL.masked_fill(elsewhere_BL, 0), self.weight)
            x_BLD = x_BLD.masked_fill(elsewhere_BL.unsqueeze(-1), 0)
        else:  # more ranks than blocks of rows
            x_BLD = self.weight.new_zeros(*tokens_BL.shape, self.weight.shape[1])
        return self.collectives.sum(x_BLD)


class GatheredOutput(nn.Module):
    """An output layer whose vocabulary lies on several ranks: each computes its logits, all get all of them."""

    def __init__(self, linear: nn.Linear, *, tp: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.vocab_size, self.tp = linear.out_features, tp
        self.collectives: Collectives = ProcessGroupCollectives(tp)

    def forward(self, x_BD: Tensor) -> Tensor:
        _, num_rows = chunk_bounds(self.vocab_size, self.tp, 0)
        own_BR = F.linear(x_BD, self.weight, self.bias)
        own_BR = F.pad(own_BR, (0, num_rows - own_BR.shape[-1]))  # the last ranks may have fewer rows
        return self.collectives.gather(own_BR)[..., : self.vocab_size]


def use_collectives(model: nn.Module, collectives: Collectives) -> None:
    """Let the parallel modules inside of `model` (or itself) use `collectives` from here on."""
    for module in model.modules():
        if isinstance(module, SummedLinear | SlicedEmbedding | GatheredOutput):
            module.collectives = collectives
