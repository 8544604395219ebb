"""Attention within documents on a CPU, behind the attention seam: SDPA of each by itself, with windows and sinks.

A sample's documents, or chunks of them, are runs of equal numbers. Queries may be the last C of E tokens whose keys are
given, as context parallelism needs. Of a window, bands of queries see the keys that one of them sees.

Neither FlexAttention nor varlen's kernel has a backward on a CPU. SDPA of each document takes a sixth of the time of
SDPA with an additive mask: eight documents in 2048 tokens, forward and backward (scripts/bench/documents.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.attention import first_features, to_one_width

_MIN_BAND = 128  # queries of one call, if a window is shorter: a call takes as long as some keys that none sees


def positions_in_documents(documents_BS: Tensor) -> Tensor:
    """Positions that restart at 0 in each document: int64 [B, S]."""
    places_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return places_S - torch.where(begins_BS, places_S, 0).cummax(dim=1).values


def chunks_of_documents(documents_BS: Tensor, chunk: int, *, positions_restart: bool = True) -> Tensor:
    """Numbers of the documents' chunks instead of documents, int64 [B, S]: tokens of one have equal position // chunk.

    `positions_restart`: they do in each document; else they are those in the sequence.
    """
    positions_BS = positions_in_documents(documents_BS)
    begins_BS = positions_BS == 0
    if not positions_restart:
        positions_BS = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    return (begins_BS | (positions_BS % chunk == 0)).cumsum(dim=1)


class PerDocumentAttention(nn.Module):
    """SDPA of each document by itself. The mask is the documents' numbers, of all samples or one row for all."""

    def __init__(self, window: int | None = None):
        super().__init__()
        self.window = window

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> Tensor:
        return documents_BE

    def forward(
        self,
        q_BCNH: Tensor,
        k_BEKH: Tensor,
        v_BEKH: Tensor,
        mask: Tensor,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        q, k, v = to_one_width(q_BCNH, k_BEKH, v_BEKH)
        out_BCNH: Tensor = _attend(q, k, v, mask, sinks_N, self.window, scale)[0]
        return first_features(out_BCNH, v_BEKH.shape[-1])


# One operation, because a compiler cannot trace a loop over documents whose lengths are values; it also lets
# checkpointing by operation keep the result.
@torch.library.custom_op("titan::attend_within_documents", mutates_args=())
def _attend_within_documents(
    q_BCNH: Tensor,
    k_BEKH: Tensor,
    v_BEKH: Tensor,
    documents_BE: Tensor,
    sinks_N: Tensor | None,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The attention's result, and the logarithms of the sums of its softmax, with sinks, [B, N, C]."""
    out_BCNH = torch.empty_like(q_BCNH, memory_format=torch.contiguous_format)
    sums_BNC = _empty_sums(q_BCNH)
    for samples, queries, keys, bias in _pieces(documents_BE, q_BCNH, window):
        q, k, v = (
            _of_piece(q_BCNH, samples, queries),
            _of_piece(k_BEKH, samples, keys),
            _of_piece(v_BEKH, samples, keys),
        )
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        out_BCNH[samples, queries] = out.transpose(1, 2)
        sums_BNC[samples, :, queries] = sums
    if sinks_N is not None:
        sinks_N1 = sinks_N.to(sums_BNC.dtype).unsqueeze(1)
        out_BCNH *= (sums_BNC - sinks_N1).sigmoid().transpose(1, 2).unsqueeze(-1)
        sums_BNC = torch.logaddexp(sums_BNC, sinks_N1)
    return out_BCNH, sums_BNC


@_attend_within_documents.register_fake
def _(q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q_BCNH.new_empty((*q_BCNH.shape[:-1], v_BEKH.shape[-1])), _empty_sums(q_BCNH)


@torch.library.custom_op("titan::attend_within_documents_backward", mutates_args=())
def _backward_within_documents(
    gradient_BCNH: Tensor,
    q_BCNH: Tensor,
    k_BEKH: Tensor,
    v_BEKH: Tensor,
    documents_BE: Tensor,
    out_BCNH: Tensor,
    sums_BNC: Tensor,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those of keys that no query sees are 0.

    They follow from the result and the sums with sinks, as those of attention to some keys from the merged results of
    all: softmax's are those of its normalized values, and a sink's value is 0.
    """
    of_q, of_k, of_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_BCNH, k_BEKH, v_BEKH))
    for samples, queries, keys, bias in _pieces(documents_BE, q_BCNH, window):
        gradient, q, out = (_of_piece(x, samples, queries) for x in (gradient_BCNH, q_BCNH, out_BCNH))
        k, v = (_of_piece(x, samples, keys) for x in (k_BEKH, v_BEKH))
        sums = sums_BNC[samples, :, queries]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, sums, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        of_q[samples, queries] = gradients[0].transpose(1, 2)
        of_k[samples, keys] += gradients[1].transpose(1, 2)  # bands of queries share keys
        of_v[samples, keys] += gradients[2].transpose(1, 2)
    return of_q, of_k, of_v


@_backward_within_documents.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient_BCNH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, documents_BE, sinks_N, out_BCNH, sums_BNC = ctx.saved_tensors
    of_qkv = _backward_within_documents(gradient_BCNH, q, k, v, documents_BE, out_BCNH, sums_BNC, ctx.window, ctx.scale)
    of_sinks_N = None
    if sinks_N is not None:
        shares_BNC = (sinks_N.to(sums_BNC.dtype).unsqueeze(1) - sums_BNC).exp()  # of the sinks in the softmax
        products_BCN = (gradient_BCNH * out_BCNH).sum(dim=-1)
        of_sinks_N = -(shares_BNC * products_BCN.transpose(1, 2)).sum(dim=(0, 2)).to(sinks_N.dtype)
    return *of_qkv, None, of_sinks_N, None, None


_attend_within_documents.register_autograd(_backward, setup_context=_save_for_backward)
_attend = torch.ops.titan.attend_within_documents


def _pieces(
    documents_BE: Tensor, q_BCNH: Tensor, window: int | None
) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """(samples, queries, keys that they see, additive mask) of each document, or band of one, with queries.

    Queries are the last C of the E tokens. The mask is None if the kernel's own causal mask is right.
    """
    num_samples, (_, num_keys) = len(q_BCNH), documents_BE.shape
    first = num_keys - q_BCNH.shape[1]
    masks: dict[tuple[int, int, int], Tensor] = {}
    for row, documents_E in enumerate(documents_BE):
        samples = slice(row, row + 1) if len(documents_BE) > 1 else slice(num_samples)
        stop = 0
        for length in torch.unique_consecutive(documents_E, return_counts=True)[1].tolist():
            start, stop = stop, stop + length
            reach = length if window is None else window
            for begin in range(max(start, first), stop, max(reach, _MIN_BAND)):
                end = min(begin + max(reach, _MIN_BAND), stop)
                oldest = max(start, begin - reach + 1)
                bias = None
                if begin > oldest or end - begin > reach:
                    shape = end - begin, end - oldest, reach
                    if shape not in masks:
                        masks[shape] = _band(*shape, dtype=q_BCNH.dtype)
                    bias = masks[shape]
                yield samples, slice(begin - first, end - first), slice(oldest, end), bias


def _band(num_queries: int, num_keys: int, reach: int, *, dtype: torch.dtype) -> Tensor:
    """0 if one of the last queries of `num_keys` tokens sees a key, else -inf: [num_queries, num_keys]."""
    last = num_keys - num_queries
    sees = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(last).triu(last - reach + 1)
    return torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, float("-inf"))


def _of_piece(x_BLNH: Tensor, samples: slice, places: slice) -> Tensor:
    """[B, N, length, H]."""
    return x_BLNH[samples, places].transpose(1, 2)


def _empty_sums(q_BCNH: Tensor) -> Tensor:
    batch, length, heads, _ = q_BCNH.shape
    return q_BCNH.new_empty((batch, heads, length), dtype=torch.promote_types(q_BCNH.dtype, torch.float32))
