"""Attention with a mask on a GPU, behind the attention seam: FlexAttention, and varlen's kernel."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import first_features, to_one_width


class FlexAttention(nn.Module):
    """torch's FlexAttention; the mask is a BlockMask.

    Sinks scale its result: the softmax without them sums to exp(lse), and with them to exp(lse) + exp(sink).
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import AuxRequest

        self.window, self._with_sums = window, AuxRequest(lse=True)

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> Any:
        batch, num_keys = documents_BE.shape
        first, window = num_keys - num_queries, self.window

        def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = sample if batch > 1 else 0  # `sample` counts those of q, also if one row is for all
            own = documents_BE[row, query + first] == documents_BE[row, key]
            seen = own & (query + first >= key)
            return seen if window is None else seen & (query + first - key < window)

        make = _compiled_block_mask() if documents_BE.is_cuda else _block_mask()
        return make(sees, batch, None, num_queries, num_keys, device=documents_BE.device.type)

    def forward(
        self,
        q_BCNH: Tensor,
        k_BEKH: Tensor,
        v_BEKH: Tensor,
        mask: Any,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        q_BNCH, k_BKEH, v_BKEH = (x.transpose(1, 2) for x in (q_BCNH, k_BEKH, v_BEKH))
        grouped = q_BNCH.shape[1] != k_BKEH.shape[1]
        attend = (
            _flex_attention() if torch.compiler.is_compiling() or not q_BCNH.is_cuda else _compiled_flex_attention()
        )
        attend = partial(attend, q_BNCH, k_BKEH, v_BKEH, block_mask=mask, scale=scale, enable_gqa=grouped)
        out_BNCH: Tensor
        if sinks_N is None:
            out_BNCH = attend()
            return out_BNCH.transpose(1, 2)
        out_BNCH, sums = attend(return_aux=self._with_sums)
        shares_BNC1 = (sums.lse - sinks_N.float().unsqueeze(1)).sigmoid().unsqueeze(-1)
        out_BNCH = out_BNCH * shares_BNC1.type_as(out_BNCH)
        return out_BNCH.transpose(1, 2)


class VarlenAttention(nn.Module):
    """torch's attention over sequences of different lengths; the mask says where each document begins."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        assert window is None, "windows are refused"
        from torch.nn.attention.varlen import varlen_attn

        options = inspect.signature(varlen_attn).parameters
        self._causal = {"window_size": (-1, 0)} if "window_size" in options else {"is_causal": True}  # torch < 2.11
        self._grouped = {"enable_gqa": True} if "enable_gqa" in options else {}

    def make_mask(self, documents_BE: Tensor, *, num_queries: int) -> tuple[Tensor, int]:
        """The places where documents begin in the flattened batch, and its end: int32; and the length of a sample.

        The host waits for the number of documents, once per forward pass. Compiled layers take any number.
        """
        assert num_queries == documents_BE.shape[1], "context parallelism is refused"
        begins_BE = torch.ones_like(documents_BE, dtype=torch.bool)
        begins_BE[:, 1:] = documents_BE[:, 1:] != documents_BE[:, :-1]
        starts = F.pad(begins_BE.flatten().nonzero().flatten(), (0, 1), value=documents_BE.numel()).to(torch.int32)
        torch._dynamo.maybe_mark_dynamic(starts, 0)
        return starts, num_queries

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        mask: tuple[Tensor, int],
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        assert sinks_N is None, "sinks are refused"
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


def _allow_recompiling() -> None:
    """Raise Dynamo's limit, beyond which it would run FlexAttention with all scores in memory.

    There is a version for each window, half of a context rank and sequence length, with gradients and without: with
    context parallelism and validation GPT-OSS has as many as the default limit, 8.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    _allow_recompiling()
    return torch.compile(_flex_attention(), dynamic=False)


def _block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask


@cache
def _compiled_block_mask() -> Callable[..., Any]:
    """Uncompiled it would make the whole mask, one byte for each pair of tokens."""
    _allow_recompiling()
    return torch.compile(_block_mask(), dynamic=False)
