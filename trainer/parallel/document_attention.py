"""Attention within documents, behind the attention seam: on a CPU one by one, on a GPU FlexAttention or varlen.

A sample's documents are runs of equal numbers. Queries may be the last C of E tokens whose keys are given, as context
parallelism needs. The mask is made once per forward pass from the documents of the batch or microbatch at hand, and
goes to every layer as an argument: so recomputation and interleaved microbatches of a pipeline always have their own.

On a CPU neither kernel has a backward. SDPA of each document takes a sixth of the time of SDPA with an additive mask:
eight documents in 2048 tokens, forward and backward (scripts/bench/documents.py).
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.families.base import Family
from trainer.config.sections import Config
from trainer.models.llama3.model import first_features, to_one_width
from trainer.parallel.document_mask import attention_kernel, document_rules

if TYPE_CHECKING:
    from trainer.models.llama3.model import Transformer


class DocumentAttention(Protocol):
    """An inner attention module that takes a mask."""

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> Any:
        """The mask for queries that are the last `num_queries` of the E tokens."""
        ...

    def __call__(
        self, q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, mask: Any, scale: float | None = None
    ) -> Tensor: ...


def positions_in_documents(documents_BS: Tensor) -> Tensor:
    """Positions that restart at 0 in each document: int64 [B, S]."""
    places_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return places_S - torch.where(begins_BS, places_S, 0).cummax(dim=1).values


def choose_document_attention(kernel: str, device: torch.device) -> Callable[[], DocumentAttention]:
    """The module class for `flex` or `varlen` on this device."""
    if device.type != "cuda":
        return PerDocumentAttention
    return VarlenAttention if kernel == "varlen" else FlexAttention


def apply_document_attention(model: "Transformer", masked: Callable[[], DocumentAttention]) -> None:
    """Replace the inner attention of every layer, and let the model make the mask. Not for context parallelism."""
    for layer in model.layers.values():
        attention: Any = layer.attention
        attention.inner_attention = masked()

    def make_mask(documents_BS: Tensor) -> Any:
        return masked().make_mask(documents_BS, num_queries=documents_BS.shape[1])

    model.make_mask = make_mask


def document_machine_problems(config: Config, family: Family, device: torch.device) -> list[str]:
    """varlen's kernel is flash attention, which has no fp32; FlexAttention is Triton code."""
    if device.type != "cuda" or document_rules(config, family).mask == "none":
        return []
    if attention_kernel(config, family) == "varlen":
        if config.training.mixed_precision_param != "float32":
            return []
        return ["attention within documents by varlen computes in bfloat16; nearest: model.attn_type = flex"]
    from torch.utils._triton import has_triton

    return [] if has_triton() else ["FlexAttention needs Triton, which is not installed; nearest: attn_type = varlen"]


def document_attention_operations() -> list[Any]:
    """Those of the modules made so far: results that are worth keeping when a layer is recomputed."""
    kept: list[Any] = [_attend.default]
    if "torch.nn.attention.varlen" in sys.modules:  # importing what no layer uses takes seconds
        kept.append(torch.ops.torch_attn._varlen_attn.default)
    if "torch.nn.attention.flex_attention" in sys.modules:
        kept.append(sys.modules["torch._higher_order_ops.flex_attention"].flex_attention)
    return kept


class PerDocumentAttention(nn.Module):
    """SDPA of each document by itself. The mask is the documents' numbers."""

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> Tensor:
        return documents_BE

    def forward(
        self, q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, mask: Tensor, scale: float | None = None
    ) -> Tensor:
        out_BCNH: Tensor = _attend(*to_one_width(q_BCNH, k_BEKH, v_BEKH), mask, scale)[0]
        return first_features(out_BCNH, v_BEKH.shape[-1])


# One operation, because a compiler cannot trace a loop over documents whose lengths are values; it also lets
# checkpointing by operation keep the result.
@torch.library.custom_op("titan::attend_within_documents", mutates_args=())
def _attend_within_documents(
    q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, documents_BE: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The attention's result, and the logarithms of the sums of its softmax, [B, N, C]."""
    out_BCNH = torch.empty_like(q_BCNH, memory_format=torch.contiguous_format)
    sums_BNC = _empty_sums(q_BCNH)
    for sample, queries, keys, bias in _documents(documents_BE, q_BCNH):
        q, k, v = (
            _of_document(q_BCNH, sample, queries),
            _of_document(k_BEKH, sample, keys),
            _of_document(v_BEKH, sample, keys),
        )
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        out_BCNH[sample, queries] = out[0].transpose(0, 1)
        sums_BNC[sample, :, queries] = sums[0]
    return out_BCNH, sums_BNC


@_attend_within_documents.register_fake
def _(
    q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, documents_BE: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
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
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those of keys before the first query's document are 0."""
    of_q, of_k, of_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_BCNH, k_BEKH, v_BEKH))
    for sample, queries, keys, bias in _documents(documents_BE, q_BCNH):
        gradient, q, out = (_of_document(x, sample, queries) for x in (gradient_BCNH, q_BCNH, out_BCNH))
        k, v = (_of_document(x, sample, keys) for x in (k_BEKH, v_BEKH))
        sums = sums_BNC[sample : sample + 1, :, queries]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, sums, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        for whole, places, part in zip((of_q, of_k, of_v), (queries, keys, keys), gradients, strict=True):
            whole[sample, places] = part[0].transpose(0, 1)
    return of_q, of_k, of_v


@_backward_within_documents.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient_BCNH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_within_documents(gradient_BCNH, *ctx.saved_tensors, ctx.scale), None, None


_attend_within_documents.register_autograd(_backward, setup_context=_save_for_backward)
_attend = torch.ops.titan.attend_within_documents


def _documents(documents_BE: Tensor, q_BCNH: Tensor) -> Iterator[tuple[int, slice, slice, Tensor | None]]:
    """(sample, its queries, its keys, additive mask) of each document with queries, the last C of the E tokens.

    The mask is None where there are as many queries as keys: then the kernel's own causal mask is right.
    """
    first = documents_BE.shape[1] - q_BCNH.shape[1]
    for sample, documents_E in enumerate(documents_BE):
        stop = 0
        for length in torch.unique_consecutive(documents_E, return_counts=True)[1].tolist():
            start, stop = stop, stop + length
            begin = max(start, first)
            if begin >= stop:
                continue
            bias = None
            if begin > start:
                sees = torch.ones(stop - begin, length, dtype=torch.bool).tril(begin - start)
                bias = torch.zeros(sees.shape, dtype=q_BCNH.dtype).masked_fill(~sees, float("-inf"))
            yield sample, slice(begin - first, stop - first), slice(start, stop), bias


def _of_document(x_BLNH: Tensor, sample: int, places: slice) -> Tensor:
    """[1, N, length, H]."""
    return x_BLNH[sample : sample + 1, places].transpose(1, 2)


def _empty_sums(q_BCNH: Tensor) -> Tensor:
    batch, length, heads, _ = q_BCNH.shape
    return q_BCNH.new_empty((batch, heads, length), dtype=torch.promote_types(q_BCNH.dtype, torch.float32))


class FlexAttention(nn.Module):
    """torch's FlexAttention; the mask is a BlockMask."""

    def __init__(self) -> None:
        super().__init__()
        import torch.nn.attention.flex_attention  # noqa: F401

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> Any:
        batch, num_keys = documents_BE.shape
        first = num_keys - num_queries

        def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = documents_BE[sample, query + first] == documents_BE[sample, key]
            return own & (query + first >= key)

        make = _compiled_block_mask() if documents_BE.is_cuda else _block_mask()
        return make(sees, batch, None, num_queries, num_keys, device=documents_BE.device.type)

    def forward(self, q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, mask: Any, scale: float | None = None) -> Tensor:
        q_BNCH, k_BKEH, v_BKEH = (x.transpose(1, 2) for x in (q_BCNH, k_BEKH, v_BEKH))
        grouped = q_BNCH.shape[1] != k_BKEH.shape[1]
        attend = (
            _flex_attention() if torch.compiler.is_compiling() or not q_BCNH.is_cuda else _compiled_flex_attention()
        )
        out_BNCH: Tensor = attend(q_BNCH, k_BKEH, v_BKEH, block_mask=mask, scale=scale, enable_gqa=grouped)
        return out_BNCH.transpose(1, 2)


class VarlenAttention(nn.Module):
    """torch's attention over sequences of different lengths; the mask says where each document begins."""

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention.varlen import varlen_attn

        options = inspect.signature(varlen_attn).parameters
        self._causal = {"window_size": (-1, 0)} if "window_size" in options else {"is_causal": True}  # torch < 2.11
        self._grouped = {"enable_gqa": True} if "enable_gqa" in options else {}

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> tuple[Tensor, int]:
        """Where documents begin in the flattened batch, and the end of it: int32; and the length of a sample.

        The host waits for the number of documents, once per forward pass. Compiled layers take any number.
        """
        assert num_queries == documents_BE.shape[1], "context parallelism is refused"
        begins_BE = torch.ones_like(documents_BE, dtype=torch.bool)
        begins_BE[:, 1:] = documents_BE[:, 1:] != documents_BE[:, :-1]
        starts = F.pad(begins_BE.flatten().nonzero().flatten(), (0, 1), value=documents_BE.numel()).to(torch.int32)
        torch._dynamo.maybe_mark_dynamic(starts, 0)
        return starts, num_queries

    def forward(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: tuple[Tensor, int], scale: float | None = None
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = mask
        q_TNH, k_TKH, v_TKH = (x.flatten(0, 1) for x in to_one_width(q_BLNH, k_BLKH, v_BLKH))
        options: dict[str, Any] = self._causal | (self._grouped if q_TNH.shape[1] != k_TKH.shape[1] else {})
        if scale is not None:
            options["scale"] = scale
        out = varlen_attn(q_TNH, k_TKH, v_TKH, starts, starts, longest, longest, **options)
        assert isinstance(out, Tensor), "no auxiliary results are asked for"
        return first_features(out.view(*q_BLNH.shape[:-1], -1), v_BLKH.shape[-1])


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(_flex_attention(), dynamic=False)


def _block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask


@cache
def _compiled_block_mask() -> Callable[..., Any]:
    """Uncompiled it would make the whole mask, one byte for each pair of tokens."""
    return torch.compile(_block_mask(), dynamic=False)
