"""Tensor parallelism of inference: the slice of each weight that a rank holds, and modules with explicit collectives.

Two all-reduces per layer (after wo, and after w2 or the sum over experts), one for the embedding, one all-gather for
the logits. Every rank gets identical logits, so each can choose the next token by itself.

Shape letters: B batch, L tokens, D model dim, V vocabulary, R the vocabulary rows of one rank.
"""

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from converters.common.box import Box
from converters.common.errors import ConfigError
from converters.families.args import DecoderArgs
from converters.families.parameters import Parameter, Role
from converters.layout.layout import chunk_bounds

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


def valid_tp(args: DecoderArgs) -> list[int]:
    """The tp degrees that slice attention at head boundaries; with more ranks than KV heads, those are replicated.

    Feed-forward and vocabulary may be sliced unevenly, so they set no limit.
    """
    heads, kv_heads = args.num_heads, args.num_kv_heads
    return [tp for tp in range(1, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)]


def check_tp(args: DecoderArgs, tp: int) -> None:
    """Raise ConfigError if `tp` cannot divide the attention heads."""
    valid = valid_tp(args)
    if tp not in valid:
        raise ConfigError(
            f"--tp {tp} cannot split {args.num_heads} attention heads and {args.num_kv_heads} key/value heads",
            hint=f"valid: {', '.join(map(str, valid))}",
            tries=[f"--tp {max((v for v in valid if v < tp), default=1)}"],
        )


def slice_for_rank(parameter: Parameter, args: DecoderArgs, *, tp: int, rank: int) -> Box:
    """The box that `rank` of `tp` holds; it may be empty where uneven slicing leaves nothing."""
    offsets, sizes = [0] * len(parameter.shape), list(parameter.shape)
    dim = parameter.tp_dim
    if dim is not None:
        if tp > args.num_kv_heads and parameter.role is Role.KV_COLUMN:
            # Several ranks hold the same KV head: the one of this rank's query heads
            offsets[dim], sizes[dim] = rank * args.num_kv_heads // tp * args.head_dim, args.head_dim
        elif parameter.role is Role.EXPERT_GATE_UP:  # a gate and its up-projection stay together
            start, num = chunk_bounds(sizes[dim] // 2, tp, rank)
            offsets[dim], sizes[dim] = 2 * start, 2 * num
        else:
            offsets[dim], sizes[dim] = chunk_bounds(sizes[dim], tp, rank)
    return Box(tuple(offsets), tuple(sizes))


def same_input(parameters: Sequence[Parameter]) -> list[tuple[str, ...]]:
    """The linear layers that read the same input: one group per attention and feed-forward, in model order."""
    groups: dict[str, list[str]] = {}
    for parameter in parameters:
        if parameter.input_group and parameter.is_linear_weight:
            groups.setdefault(parameter.input_group, []).append(parameter.module)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def summed_inputs(parameters: Sequence[Parameter]) -> list[str]:
    """The linear layers with sliced input features, whose outputs are partial sums: wo and w2 of each layer."""
    return [p.module for p in parameters if p.role is Role.ROW and not p.is_bias]


def sum_of_ranks(part: Tensor) -> Tensor:
    """The sum of the ranks' `part`s, which are overwritten; identical on all ranks."""
    dist.all_reduce(part)
    return part


def concatenated(part: Tensor, *, tp: int) -> Tensor:
    """The `part`s of all `tp` ranks, concatenated along the last dim."""
    parts = part.new_empty(tp * part.shape[0], *part.shape[1:])
    _all_gather_single(parts, part)
    return parts.view(tp, *part.shape).movedim(0, -2).flatten(-2)


class SummedLinear(nn.Module):
    """A linear layer with sliced input features: each rank multiplies its own, the all-reduced sum is the output.

    Every rank has the whole bias, which is added to the sum.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out = sum_of_ranks(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class AllReduce(nn.Module):
    """The sum of the ranks' partial outputs."""

    def forward(self, part: Tensor) -> Tensor:
        return sum_of_ranks(part)


class SlicedEmbedding(nn.Module):
    """An embedding with sliced rows: a rank looks up its own tokens and takes zeros for the others."""

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
        return sum_of_ranks(x_BLD)


class GatheredOutput(nn.Module):
    """An output layer with a sliced vocabulary: each rank computes its logits, which are all-gathered."""

    def __init__(self, linear: nn.Linear, *, tp: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.vocab_size, self.tp = linear.out_features, tp

    def forward(self, x_BD: Tensor) -> Tensor:
        _, num_rows = chunk_bounds(self.vocab_size, self.tp, 0)
        own_BR = F.linear(x_BD, self.weight, self.bias)
        own_BR = F.pad(own_BR, (0, num_rows - own_BR.shape[-1]))  # the last ranks may have fewer rows
        return concatenated(own_BR, tp=self.tp)[..., : self.vocab_size]
