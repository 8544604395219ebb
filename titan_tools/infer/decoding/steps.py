"""Forward passes over the cache: prompts, decode steps of any length, and decode steps of fixed shapes.

Shape letters as in cache.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tools.infer.decoding.attention import (
    attend_one,
    bias_of,
    can_flash,
    copies_heads,
    flash_with_sinks,
    with_sinks,
)
from titan_tools.infer.decoding.cache import PLAIN, LayerCache, Mark, Softmax
from titan_tools.infer.decoding.products import attend_by_products, fits
from titan_tools.infer.decoding.sampling import likeliest
from titan_tools.infer.model.reach import Reach

_MOST_PADDING = 128  # keys per row; with more, a CPU is faster with one call of attention for each row


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` - 1 of a row; `marks`: after which of them the windows are copied, see KVCache."""

    row: int
    start: int
    end: int
    marks: tuple[int, ...] = ()


class Prefill:
    """Spans of several rows in one pass, packed into one sequence: each attends to its own row only."""

    expands = True

    def __init__(self, spans: Sequence[Span], *, device: torch.device, dtype: torch.dtype):
        self.spans, self.device, self.dtype = spans, device, dtype
        self.sizes = [span.end - span.start for span in spans]
        self.positions = torch.cat([torch.arange(span.start, span.end) for span in spans]).to(device)
        self.copies_heads = copies_heads(device.type, dtype)
        self.marks: dict[Span, dict[int, list[tuple[Tensor, Tensor]]]] = {
            span: {at: [] for at in span.marks} for span in spans
        }
        self._last = {span.row: place for place, span in enumerate(spans)}  # whose tokens a row has after the pass
        self._masks: dict[tuple[Any, ...], Any] = {}

    def marks_of(self, span: Span) -> dict[int, Mark]:
        """Copies of the windows, once the pass is done."""
        return dict(self.marks[span])

    def attend(
        self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, softmax: Softmax = PLAIN
    ) -> Tensor:
        packed = (torch.split(packed_1LXH, self.sizes, dim=1) for packed_1LXH in (q_BLNH, k_BLKH, v_BLKH))
        parts = []
        for place, (span, q_1LNH, k_1LKH, v_1LKH) in enumerate(zip(self.spans, *packed, strict=True)):
            k_1KLH, v_1KLH = k_1LKH.transpose(1, 2), v_1LKH.transpose(1, 2)
            attend = self._attend_in_place if span.end <= layer.reach.size else self._attend_beyond
            is_last = self._last[span.row] == place
            parts.append(attend(layer, span, q_1LNH, k_1KLH, v_1KLH, softmax, is_last=is_last))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend_in_place(
        self,
        layer: LayerCache,
        span: Span,
        q_1LNH: Tensor,
        k_1KLH: Tensor,
        v_1KLH: Tensor,
        softmax: Softmax,
        *,
        is_last: bool,
    ) -> Tensor:
        """Where each position has a slot of its own."""
        row, start, end = span.row, span.start, span.end
        layer.write((row, slice(None), slice(start, end)), k_1KLH[0], v_1KLH[0])
        keys, values = (cached[row : row + 1, :, :end] for cached in (layer.keys_RKTH, layer.values_RKTH))
        if is_last:
            self._mark(layer, span, keys, values, first=0)
        if layer.expand is not None:
            keys, values = layer.expand(keys)
        return self._attend_part(layer, (0, start, end), q_1LNH, keys, values, softmax)

    def _attend_beyond(
        self,
        layer: LayerCache,
        span: Span,
        q_1LNH: Tensor,
        k_1KLH: Tensor,
        v_1KLH: Tensor,
        softmax: Softmax,
        *,
        is_last: bool,
    ) -> Tensor:
        """Where new tokens take the slots of earlier ones, which are read before."""
        reach, start = layer.reach, span.start
        # One more than a query sees: a mark has as many as there are slots
        first = max(0, start - reach.size) if reach.is_window else reach.chunk_start(start)
        before = layer.at(span.row, first, start)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, (k_1KLH, v_1KLH), strict=True))
        parts = []
        for seen, begin, end in reach.pieces(start, span.end):
            own, read = slice(begin - start, end - start), slice(seen - first, end - first)
            one = (seen, begin, end)
            parts.append(self._attend_part(layer, one, q_1LNH[:, own], keys[:, :, read], values[:, :, read], softmax))
        if is_last:
            self._mark(layer, span, keys, values, first=first)
            layer.put(span.row, start, k_1KLH, v_1KLH)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _mark(self, layer: LayerCache, span: Span, keys: Tensor, values: Tensor, *, first: int) -> None:
        if layer.reach.is_window:
            for at, kept in self.marks[span].items():
                read = slice(max(0, at - layer.reach.size) - first, at - first)
                kept.append((keys[:, :, read].clone(), values[:, :, read].clone()))

    def _attend_part(
        self,
        layer: LayerCache,
        part: tuple[int, int, int],
        q_1LNH: Tensor,
        keys_1KTH: Tensor,
        values_1KTH: Tensor,
        softmax: Softmax,
    ) -> Tensor:
        """Queries of `part`'s second to third position over the keys from its first one on."""
        seen, start, end = part
        window = layer.reach.size if layer.reach.is_window and end - seen > layer.reach.size else None
        special = softmax.sinks_N is not None or window is not None
        if special and can_flash(self.device, self.dtype, q_1LNH.shape[-1]):
            return flash_with_sinks(
                q_1LNH, keys_1KTH, values_1KTH, window=window, scale=softmax.scale, sinks_N=softmax.sinks_N
            )
        mask = self._mask(part, window, as_tensor=special)
        q_1NLH = q_1LNH.transpose(1, 2)
        if softmax.sinks_N is not None:
            out_1NLH = with_sinks(
                q_1NLH, keys_1KTH, values_1KTH, softmax.sinks_N.view(1, -1, 1), bias=mask, is_causal=mask is None,
                scale=softmax.scale,
            )  # fmt: skip
        else:
            out_1NLH = self._attend_one_row(q_1NLH, keys_1KTH, values_1KTH, mask, softmax.scale)
        return out_1NLH.transpose(1, 2)

    def _attend_one_row(
        self, q_1NLH: Tensor, keys_1KTH: Tensor, values_1KTH: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        grouping = q_1NLH.shape[1] // keys_1KTH.shape[1]
        if grouping > 1 and self.copies_heads:
            keys_1KTH, values_1KTH = (cached.repeat_interleave(grouping, dim=1) for cached in (keys_1KTH, values_1KTH))
        return F.scaled_dot_product_attention(
            q_1NLH,
            keys_1KTH,
            values_1KTH,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q_1NLH.shape[1] != keys_1KTH.shape[1],
            scale=scale,
        )

    def _mask(self, part: tuple[int, int, int], window: int | None, *, as_tensor: bool) -> Any:
        """The mask of a part, the same for all layers with its reach."""
        known = part, window, as_tensor
        if known not in self._masks:
            self._masks[known] = _prefill_mask(part, window, self.device, self.dtype, as_tensor=as_tensor)
        return self._masks[known]


def _prefill_mask(
    part: tuple[int, int, int], window: int | None, device: torch.device, dtype: torch.dtype, *, as_tensor: bool
) -> Tensor | None:
    """None if the queries are the first tokens seen. Elsewhere `is_causal` would be wrong: it counts them from 0."""
    seen, start, end = part
    if start == seen and window is None:
        return None
    if device.type == "cuda" and dtype != torch.float32 and not as_tensor:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes seconds

        return causal_lower_right(end - start, end - seen)  # supported by flash attention without a mask
    columns = torch.arange(end - seen, device=device)
    bias = bias_of(columns[start - seen :], columns, dtype)
    if window is not None:
        bias = bias.masked_fill_(columns <= columns[start - seen :].view(-1, 1) - window, -torch.inf)
    return bias


class Decode:
    """One new token for each of the first B rows, over as many keys as the longest row has: fast on a CPU.

    On a CPU, rows of very different lengths attend one after another, each over its own keys only.
    """

    expands = False

    def __init__(self, lengths: Sequence[int], *, reaches: Iterable[Reach], device: torch.device, dtype: torch.dtype):
        at_B = torch.tensor(lengths, device=device)
        self.positions = at_B[:, None]
        self._keys = {reach: _KeysOfRows(lengths, at_B, reach, dtype) for reach in reaches}

    def attend(
        self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, softmax: Softmax = PLAIN
    ) -> Tensor:
        return self._keys[layer.reach].attend(layer, q_BLNH, k_BLKH, v_BLKH, softmax)


class _KeysOfRows:
    """What the new tokens of rows see in layers of one reach."""

    def __init__(self, lengths: Sequence[int], at_B: Tensor, reach: Reach, dtype: torch.dtype):
        self.num, self.ends = len(lengths), [reach.num_seen(length) for length in lengths]
        self.end = max(self.ends)
        self.bias_B11T: Tensor | None = None
        self.written: tuple[Any, ...]  # index of the new keys
        num_padded = self.num * self.end - sum(self.ends)
        self.is_one_by_one = at_B.device.type == "cpu" and num_padded > _MOST_PADDING * self.num
        if len(set(lengths)) == 1:
            self.written = (slice(self.num), slice(None), lengths[0] % reach.size)
            return
        self.written = (torch.arange(self.num, device=at_B.device), slice(None), at_B % reach.size)
        if num_padded and not self.is_one_by_one:
            columns = torch.arange(self.end, device=at_B.device)
            self.bias_B11T = bias_of(reach.last_slot(at_B), columns, dtype)[:, None, None]

    def attend(self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, softmax: Softmax) -> Tensor:
        layer.write(self.written, k_BLKH[:, 0], v_BLKH[:, 0])
        if self.is_one_by_one:
            parts = []
            for row, end in enumerate(self.ends):
                one = slice(row, row + 1)
                parts.append(_attend_index(q_BLNH[one], layer, (one, slice(None), slice(end)), None, softmax))
            return torch.cat(parts)
        index = (slice(self.num), slice(None), slice(self.end))
        return _attend_index(q_BLNH, layer, index, self.bias_B11T, softmax)


class KeyRange(Protocol):
    """The keys that the rows of a static step attend to, in layers of one reach."""

    @property
    def as_long(self) -> tuple[Tensor, int]:
        """A tensor, and its dim that has the number of keys: what is compiled takes it from there."""

    def begin(self, last_B1: Tensor) -> None:
        """Compute what all layers share; `last_B1`: the last slot that each row sees."""

    def attend(self, q_B1NH: Tensor, layer: LayerCache, softmax: Softmax) -> Tensor:
        """Attention over a layer's whole cache: out_B1NH."""


class StaticDecode:
    """One new token for each of the first `num` rows of up to `length` tokens: the same shapes at every length.

    What changes from step to step is in tensors at fixed addresses, so that a step can be recorded as a CUDA graph.
    After a run they hold the input of the step after it: the likeliest tokens, which have not left the device.
    """

    expands = False

    def __init__(
        self,
        *,
        num: int,
        length: int,
        reaches: Iterable[Reach],
        make_range: Callable[[Reach, int], KeyRange],
        device: torch.device,
    ):
        """`make_range`: of a reach, and as many of its first slots as rows of `length` tokens use."""
        self.num, self.length = num, length
        self.ranges: Mapping[Reach, KeyRange] = {reach: make_range(reach, min(length, reach.size)) for reach in reaches}
        self.found_2B = torch.zeros(2, num, dtype=torch.int64, device=device)  # see `likeliest`
        self.inputs_2B = torch.zeros(2, num, dtype=torch.int64, device=device)
        self.tokens, self.positions = self.inputs_2B.unsqueeze(-1)  # [B, 1] each
        self.at_B = self.inputs_2B[1]
        self.rows = torch.arange(num, device=device)
        self._slots_B: dict[Reach, Tensor] = {}

    def fill(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the next token of the first rows. The other rows compute tokens from their beginning on."""
        idle = [0] * (self.num - len(tokens))
        self.inputs_2B.copy_(torch.tensor([[*tokens, *idle], [*lengths, *idle]]))

    def begin(self) -> None:
        """Compute what all layers share; part of the graph."""
        for reach, keys in self.ranges.items():
            wraps = reach.size < self.length
            self._slots_B[reach] = self.at_B % reach.size if wraps else self.at_B
            keys.begin(reach.last_slot(self.positions) if wraps else self.positions)

    def advance(self, logits_BV: Tensor) -> None:
        """Choose the likeliest tokens and make them the input at the next positions; part of the graph."""
        self.found_2B.copy_(likeliest(logits_BV))
        self.inputs_2B[0] = self.found_2B[1]
        self.at_B += 1

    def attend(
        self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, softmax: Softmax = PLAIN
    ) -> Tensor:
        layer.write((self.rows, slice(None), self._slots_B[layer.reach]), k_BLKH[:, 0], v_BLKH[:, 0])
        return self.ranges[layer.reach].attend(q_BLNH, layer, softmax)


class MaskedKeys:
    """The first `length` slots of each row, with a mask for those that it does not see.

    `by_products`: of a cache in which all query heads share one key; see `products.py`.
    """

    def __init__(self, *, num: int, length: int, device: torch.device, dtype: torch.dtype, by_products: bool = False):
        self.num, self.dtype, self.by_products = num, dtype, by_products
        self.columns = torch.arange(length, device=device)
        self.bias_B11T: Tensor | None = None

    def begin(self, last_B1: Tensor) -> None:
        self.bias_B11T = bias_of(last_B1, self.columns, self.dtype)[:, None, None]

    @property
    def as_long(self) -> tuple[Tensor, int]:
        assert self.bias_B11T is not None  # after `begin`
        return self.bias_B11T, 3

    def attend(self, q_B1NH: Tensor, layer: LayerCache, softmax: Softmax) -> Tensor:
        assert self.bias_B11T is not None
        length = self.bias_B11T.shape[3]
        if self.by_products and not torch.compiler.is_compiling() and fits(q_B1NH, length):
            keys_BTH, values_BTH = (c[: self.num, 0, :length] for c in (layer.keys_RKTH, layer.values_RKTH))
            out_BNH = attend_by_products(q_B1NH[:, 0], keys_BTH, values_BTH, self.bias_B11T[:, 0], softmax.scale)
            return out_BNH.unsqueeze(1)
        index = (slice(self.num), slice(None), slice(length))
        return _attend_index(q_B1NH, layer, index, self.bias_B11T, softmax)


def _attend_index(
    q_B1NH: Tensor, layer: LayerCache, index: tuple[slice, ...], bias_B11T: Tensor | None, softmax: Softmax
) -> Tensor:
    keys_BKTH, values_BKTH = layer.keys_RKTH[index], layer.values_RKTH[index]
    return attend_one(q_B1NH, keys_BKTH, values_BKTH, bias_B11T=bias_B11T, scale=softmax.scale, sinks_N=softmax.sinks_N)
