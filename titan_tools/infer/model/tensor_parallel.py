"""The three modules of tensor parallelism, with explicit collectives on plain local tensors.

Two all-reduces per layer (after wo and w2), one for the embedding, one all-gather for the logits. Every rank gets
identical logits, so each can choose the next token by itself.

Shape letters: B batch, L tokens, D model dim, V vocabulary, R the vocabulary rows of one rank.
"""

from typing import Protocol

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from converters.layout import chunk_bounds

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
_GATHERED_BYTES = 256 << 10  # of all ranks together; for more, all-reduce transfers less


class Collectives(Protocol):
    """All-reduce and all-gather with identical results on all ranks."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of the ranks' `part`s, which may be overwritten."""

    def gather(self, part: Tensor) -> Tensor:
        """The ranks' `part`s, concatenated along the last dim."""


class ProcessGroupCollectives:
    """Collectives of torch's process group."""

    def __init__(self, tp: int):
        self.tp = tp

    def sum(self, part: Tensor) -> Tensor:
        """On a CPU small tensors are gathered and summed here.

        gloo's all-reduce takes two rounds of messages, a gather one, and in decoding their number is the cost.
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
    """A linear layer with sliced input features: each rank multiplies its own, the all-reduced sum is the output.

    Every rank has the whole bias, which is added to the sum.
    """

    def __init__(self, linear: nn.Linear, *, tp: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.collectives: Collectives = ProcessGroupCollectives(tp)

    def forward(self, x: Tensor) -> Tensor:
        out = self.collectives.sum(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class SlicedEmbedding(nn.Module):
    """An embedding with sliced rows: a rank looks up its own tokens and takes zeros for the others."""

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
    """An output layer with a sliced vocabulary: each rank computes its logits, which are all-gathered."""

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
    """Set the collectives of all parallel modules in `model`, itself included."""
    for module in model.modules():
        if isinstance(module, SummedLinear | SlicedEmbedding | GatheredOutput):
            module.collectives = collectives
