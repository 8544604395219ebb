"""The key/value cache and attention over it: preallocated once, written in place.

Shape letters: R rows of the cache (sequences), B active rows, L new tokens, T tokens of a row that are attended to,
N query heads, K key/value heads, G = N/K query heads per key/value head, H head dim.
"""

import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_tools.infer.decoding.products import attend_by_products, fits
from titan_tools.infer.decoding.sampling import likeliest
from titan_tools.infer.model.latent_attention import LatentAttention

_MOST_PADDING = 128  # keys per row; with more, a CPU is faster with one call of attention for each row


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer. One tensor is both where the values are a part of the keys (latent attention)."""

    keys_RKTH: Tensor
    values_RKTH: Tensor
    scale: float | None = None  # of the scores; None: H ** -0.5
    # Keys and values [1, N, T, ·] of many new tokens' attention, from a row's cached keys [1, K, T, H]
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.keys_RKTH] if self.values_RKTH is self.keys_RKTH else [self.keys_RKTH, self.values_RKTH]

    def write(self, index: Any, k: Tensor, v: Tensor) -> None:
        """Store new tokens at an index of both tensors."""
        for cached_RKTH, new in zip(self.tensors, (k, v), strict=False):
            cached_RKTH[index] = new


class CacheStep(Protocol):
    """How one forward pass uses the cache of each layer."""

    positions: Tensor  # [L] or [B, L], of the new tokens

    expands: bool  # whether keys and values are those of `LayerCache.expand`

    def attend(self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        """Store the new keys and values, and attend over all that a sequence may see: out_BLNH."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` - 1 of a row."""

    row: int
    start: int
    end: int


class Prefill:
    """Spans of several rows in one pass, packed into one sequence: each attends to its own row only."""

    expands = True

    def __init__(self, spans: Sequence[Span], *, device: torch.device, dtype: torch.dtype):
        self.spans = spans
        self.sizes = [span.end - span.start for span in spans]
        self.positions = torch.cat([torch.arange(span.start, span.end) for span in spans]).to(device)
        self.masks = [_prefill_mask(span, device, dtype) for span in spans]
        self.copies_heads = copies_heads(device.type, dtype)

    def attend(self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        packed = (torch.split(packed_1LXH, self.sizes, dim=1) for packed_1LXH in (q_BLNH, k_BLKH, v_BLKH))
        parts = []
        for span, mask, q_1LNH, k_1LKH, v_1LKH in zip(self.spans, self.masks, *packed, strict=True):
            row, start, end = span.row, span.start, span.end
            layer.write((row, slice(None), slice(start, end)), k_1LKH[0].transpose(0, 1), v_1LKH[0].transpose(0, 1))
            keys, values = (cached[row : row + 1, :, :end] for cached in (layer.keys_RKTH, layer.values_RKTH))
            if layer.expand is not None:
                keys, values = layer.expand(keys)
            parts.append(self._attend_one_row(q_1LNH.transpose(1, 2), keys, values, mask, layer.scale).transpose(1, 2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

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


def _prefill_mask(span: Span, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """None at a row's beginning. After earlier tokens `is_causal` would be wrong: it counts the queries from 0."""
    if span.start == 0:
        return None
    if device.type == "cuda" and dtype != torch.float32:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes seconds

        return causal_lower_right(span.end - span.start, span.end)  # supported by flash attention without a mask
    columns = torch.arange(span.end, device=device)
    return _bias(columns[span.start :], columns, dtype)


def copies_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a prefill copies a key/value head for each query head that shares it.

    Of a GPU's kernels only flash attention takes shared heads, and it takes no fp32. The others would hold the scores
    of all heads at once: 8 GiB for 32 heads, 2048 queries and 32k keys.
    """
    return device_type == "cuda" and dtype == torch.float32


class Decode:
    """One new token for each of the first B rows, over as many keys as the longest row has: fast on a CPU.

    On a CPU, rows of very different lengths attend one after another, each over its own keys only.
    """

    expands = False

    def __init__(self, lengths: Sequence[int], *, device: torch.device, dtype: torch.dtype):
        self.num, self.ends = len(lengths), [length + 1 for length in lengths]
        self.end = max(self.ends)
        self.bias_B11T: Tensor | None = None
        self.written: tuple[Any, ...]  # index of the new keys
        at_B = torch.tensor(lengths, device=device)
        self.positions = at_B[:, None]
        num_padded = self.num * self.end - sum(self.ends)
        self.is_one_by_one = device.type == "cpu" and num_padded > _MOST_PADDING * self.num
        if num_padded == 0:
            self.written = (slice(self.num), slice(None), lengths[0])
            return
        self.written = (torch.arange(self.num, device=device), slice(None), at_B)
        if not self.is_one_by_one:
            self.bias_B11T = _bias(self.positions, torch.arange(self.end, device=device), dtype)[:, None, None]

    def attend(self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        layer.write(self.written, k_BLKH[:, 0], v_BLKH[:, 0])
        if self.is_one_by_one:
            parts = []
            for row, end in enumerate(self.ends):
                one = slice(row, row + 1)
                parts.append(_attend_one(q_BLNH[one], layer, (one, slice(None), slice(end)), None))
            return torch.cat(parts)
        return _attend_one(q_BLNH, layer, (slice(self.num), slice(None), slice(self.end)), self.bias_B11T)


class KeyRange(Protocol):
    """The keys that the rows of a static step attend to."""

    length: int  # of the longest row that fits

    @property
    def as_long(self) -> tuple[Tensor, int]:
        """A tensor, and its dim that has the size `length`: what is compiled takes the length from there."""

    def begin(self, positions_B1: Tensor) -> None:
        """Compute what all layers share; `positions_B1` of the new tokens, whose keys are in the cache by then."""

    def attend(self, q_B1NH: Tensor, layer: LayerCache) -> Tensor:
        """Attention over a layer's whole cache: out_B1NH."""


class StaticDecode:
    """One new token for each of the first `num` rows over `key_range`: the same shapes at every length.

    What changes from step to step is in tensors at fixed addresses, so that a step can be recorded as a CUDA graph.
    After a run they hold the input of the step after it: the likeliest tokens, which have not left the device.
    """

    expands = False

    def __init__(self, *, num: int, key_range: KeyRange, device: torch.device):
        self.num, self.key_range = num, key_range
        self.found_2B = torch.zeros(2, num, dtype=torch.int64, device=device)  # see `likeliest`
        self.inputs_2B = torch.zeros(2, num, dtype=torch.int64, device=device)
        self.tokens, self.positions = self.inputs_2B.unsqueeze(-1)  # [B, 1] each
        self.at_B = self.inputs_2B[1]
        self.rows = torch.arange(num, device=device)

    def fill(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the next token of the first rows. The other rows compute tokens from their beginning on."""
        idle = [0] * (self.num - len(tokens))
        self.inputs_2B.copy_(torch.tensor([[*tokens, *idle], [*lengths, *idle]]))

    def begin(self) -> None:
        """Compute what all layers share; part of the graph."""
        self.key_range.begin(self.positions)

    def advance(self, logits_BV: Tensor) -> None:
        """Choose the likeliest tokens and make them the input at the next positions; part of the graph."""
        self.found_2B.copy_(likeliest(logits_BV))
        self.inputs_2B[0] = self.found_2B[1]
        self.at_B += 1

    def attend(self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        layer.write((self.rows, slice(None), self.at_B), k_BLKH[:, 0], v_BLKH[:, 0])
        return self.key_range.attend(q_BLNH, layer)


class MaskedKeys:
    """The first `length` tokens of each row, with a mask for those after the row's end.

    `by_products`: of a cache in which all query heads share one key; see `products.py`.
    """

    def __init__(self, *, num: int, length: int, device: torch.device, dtype: torch.dtype, by_products: bool = False):
        self.num, self.length, self.dtype, self.by_products = num, length, dtype, by_products
        self.columns = torch.arange(length, device=device)
        self.bias_B11T: Tensor | None = None

    def begin(self, positions_B1: Tensor) -> None:
        self.bias_B11T = _bias(positions_B1, self.columns, self.dtype)[:, None, None]

    @property
    def as_long(self) -> tuple[Tensor, int]:
        assert self.bias_B11T is not None  # after `begin`
        return self.bias_B11T, 3

    def attend(self, q_B1NH: Tensor, layer: LayerCache) -> Tensor:
        assert self.bias_B11T is not None
        length = self.bias_B11T.shape[3]
        if self.by_products and not torch.compiler.is_compiling() and fits(q_B1NH, length):
            keys_BTH, values_BTH = (c[: self.num, 0, :length] for c in (layer.keys_RKTH, layer.values_RKTH))
            out_BNH = attend_by_products(q_B1NH[:, 0], keys_BTH, values_BTH, self.bias_B11T[:, 0], layer.scale)
            return out_BNH.unsqueeze(1)
        return _attend_one(q_B1NH, layer, (slice(self.num), slice(None), slice(length)), self.bias_B11T)


def _attend_one(q_B1NH: Tensor, layer: LayerCache, index: tuple[slice, ...], bias_B11T: Tensor | None) -> Tensor:
    keys_BKTH, values_BKTH = layer.keys_RKTH[index], layer.values_RKTH[index]
    # The G query heads of a KV head are passed as query positions: no key is copied G times
    q_BKGH = q_B1NH.reshape(*keys_BKTH.shape[:2], -1, q_B1NH.shape[-1])
    out_BKGH = F.scaled_dot_product_attention(q_BKGH, keys_BKTH, values_BKTH, attn_mask=bias_B11T, scale=layer.scale)
    return out_BKGH.reshape(q_B1NH.shape)


def _bias(positions: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, else -inf, in attention's dtype: each layer would convert a boolean mask to this."""
    hidden = columns > positions.view(-1, 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Restrict attention on a GPU to other kernels than cuDNN's.

    That one makes a plan for every new length, and on Blackwell it may be wrong for fewer than 8 KV heads
    (pytorch#193893).
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class KVCache:
    """The rows of all layers; `step` says how the current forward pass uses them."""

    def __init__(self, *, rows: int, room: int):
        self.rows, self.room = rows, room
        self.step: CacheStep | None = None
        self.layers: list[LayerCache] = []

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        for cached_RKTH in (cached for layer in self.layers for cached in layer.tensors):
            cached_RKTH[target, :, :length] = cached_RKTH[source, :, :length]


class CachedAttention(nn.Module):
    """Causal attention of the new tokens over all tokens so far, whose keys and values it keeps."""

    def __init__(self, cache: KVCache, layer: LayerCache):
        super().__init__()
        self.cache, self.layer = cache, layer

    @property
    def expands(self) -> bool:
        """Whether the current step attends to what `LayerCache.expand` makes of the cached keys."""
        assert self.cache.step is not None
        return self.cache.step.expands

    def forward(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        assert self.cache.step is not None
        return self.cache.step.attend(self.layer, q_BLNH, k_BLKH, v_BLKH)


def attach_cache(
    model: nn.Module, *, rows: int, room: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Give every layer of `model` an empty cache of `rows` × `room` tokens for the KV heads that this rank holds."""
    cache = KVCache(rows=rows, room=room)
    layers: Any = model.layers
    for layer in layers.values():
        attention = layer.attention
        keys = _zeros(rows, num_kv_heads, room, attention.head_dim, dtype, device)
        if isinstance(attention, LatentAttention):
            made = LayerCache(keys, keys, attention.scale, attention.expand)
        else:
            made = LayerCache(keys, _zeros(rows, num_kv_heads, room, attention.head_dim, dtype, device))
        attention.inner_attention = CachedAttention(cache, made)
        cache.layers.append(made)
    return cache


def _zeros(rows: int, num_kv_heads: int, room: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [R, K, T, H], not uninitialized memory: a masked key counts 0 times its value, and 0 × NaN is NaN.

    In memory token by token on a GPU, as its kernels read them, and head by head on a CPU. On a CPU from mmap: the
    system provides pages only as tokens are added.
    """
    if device.type != "cpu":
        return torch.zeros(rows, room, num_kv_heads, head_dim, dtype=dtype, device=device).transpose(1, 2)
    shape = (rows, num_kv_heads, room, head_dim)
    return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
