"""The key/value cache, behind the model's attention seam: preallocated once, written in place.

Shape letters: R rows of the cache (sequences), B of them at work, L new tokens, T tokens of a row that are looked at,
N query heads, K key/value heads, G = N/K query heads per key/value head, H head dim.
"""

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_MOST_PADDING = 128  # keys a row; beyond, reading them takes a CPU longer than calling attention once for each row


class Step(Protocol):
    """What one forward pass does with a layer's cache."""

    positions: Tensor  # [L] or [B, L], of the new tokens

    def attend(self, keys_RKTH: Tensor, values_RKTH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        """Remember the new keys and values, and attend over all that a sequence may see: out_BLNH."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start`, … `end` - 1 of a row."""

    row: int
    start: int
    end: int


class Prefill:
    """Spans of several rows in one pass, packed behind each other as one sequence: each sees only its own row."""

    def __init__(self, spans: Sequence[Span], *, device: torch.device, dtype: torch.dtype):
        self.spans = spans
        self.sizes = [span.end - span.start for span in spans]
        self.positions = torch.cat([torch.arange(span.start, span.end) for span in spans]).to(device)
        self.masks = [_prefill_mask(span, device, dtype) for span in spans]
        self.copies_heads = copies_heads(device.type, dtype)

    def attend(self, keys_RKTH: Tensor, values_RKTH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        packed = (packed_1LXH.split(self.sizes, dim=1) for packed_1LXH in (q_BLNH, k_BLKH, v_BLKH))
        parts = []
        for span, mask, q_1LNH, k_1LKH, v_1LKH in zip(self.spans, self.masks, *packed, strict=True):
            row, start, end = span.row, span.start, span.end
            keys_RKTH[row, :, start:end] = k_1LKH[0].transpose(0, 1)
            values_RKTH[row, :, start:end] = v_1LKH[0].transpose(0, 1)
            keys, values = keys_RKTH[row : row + 1, :, :end], values_RKTH[row : row + 1, :, :end]
            parts.append(self._attend_one_row(q_1LNH.transpose(1, 2), keys, values, mask).transpose(1, 2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend_one_row(self, q_1NLH: Tensor, keys_1KTH: Tensor, values_1KTH: Tensor, mask: Tensor | None) -> Tensor:
        grouping = q_1NLH.shape[1] // keys_1KTH.shape[1]
        if grouping > 1 and self.copies_heads:
            keys_1KTH, values_1KTH = (kept.repeat_interleave(grouping, dim=1) for kept in (keys_1KTH, values_1KTH))
        return F.scaled_dot_product_attention(
            q_1NLH,
            keys_1KTH,
            values_1KTH,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q_1NLH.shape[1] != keys_1KTH.shape[1],
        )


def _prefill_mask(span: Span, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """None for a row's beginning. Behind earlier tokens `is_causal` is no help: it would count the queries from 0."""
    if span.start == 0:
        return None
    if device.type == "cuda" and dtype != torch.float32:
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler: seconds at every start

        return causal_lower_right(span.end - span.start, span.end)  # flash attention knows it: no mask in memory
    columns = torch.arange(span.end, device=device)
    return _bias(columns[span.start :], columns, dtype)


def copies_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a prefill gives each query head a key/value head of its own, copied, where several share one.

    Of a GPU's kernels flash attention alone takes shared ones, and it takes no fp32. What is left would hold the scores
    of all heads at once: 8 GiB for 32 heads, 2048 queries and 32k keys.
    """
    return device_type == "cuda" and dtype == torch.float32


class Decode:
    """One new token for each of the first B rows, over no more keys than the longest has: what is fast on a CPU.

    There rows of very different lengths attend one after another, each over its own keys alone.
    """

    def __init__(self, lengths: Sequence[int], *, device: torch.device, dtype: torch.dtype):
        self.num, self.ends = len(lengths), [length + 1 for length in lengths]
        self.end, self.bias_B11T = max(self.ends), None
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

    def attend(self, keys_RKTH: Tensor, values_RKTH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        keys_RKTH[self.written] = k_BLKH[:, 0]
        values_RKTH[self.written] = v_BLKH[:, 0]
        if self.is_one_by_one:
            parts = []
            for row, end in enumerate(self.ends):
                one = slice(row, row + 1)
                parts.append(_attend_one(q_BLNH[one], keys_RKTH[one, :, :end], values_RKTH[one, :, :end], None))
            return torch.cat(parts)
        keys, values = keys_RKTH[: self.num, :, : self.end], values_RKTH[: self.num, :, : self.end]
        return _attend_one(q_BLNH, keys, values, self.bias_B11T)


class KeyRange(Protocol):
    """Which keys the rows of a static step look at, and how."""

    def begin(self, positions_B1: Tensor) -> None:
        """What is the same for all layers; `positions_B1` of the new tokens, whose keys lie in the cache by then."""

    def attend(self, q_B1NH: Tensor, keys_RKTH: Tensor, values_RKTH: Tensor) -> Tensor:
        """Attention over a layer's cache, of which all rows and tokens are given: out_B1NH."""


class StaticDecode:
    """One new token for each of the first `num` rows, which looks at `key_range`: the same shapes at every length.

    What changes from step to step lies in tensors that stay where they are, so a CUDA graph can be made of a step.
    """

    def __init__(self, *, num: int, key_range: KeyRange, device: torch.device):
        self.num, self.key_range = num, key_range
        self.inputs_2B = torch.zeros(2, num, dtype=torch.int64, device=device)
        self.tokens, self.positions = self.inputs_2B.unsqueeze(-1)  # [B, 1] each
        self.at_B = self.inputs_2B[1]
        self.rows = torch.arange(num, device=device)

    def fill(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Take the next token of the first rows. Rows past them do as if they began: only their first key is lost."""
        idle = [0] * (self.num - len(tokens))
        self.inputs_2B.copy_(torch.tensor([[*tokens, *idle], [*lengths, *idle]]))

    def begin(self) -> None:
        """What is the same for all layers; part of the graph."""
        self.key_range.begin(self.positions)

    def attend(self, keys_RKTH: Tensor, values_RKTH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        keys_RKTH[self.rows, :, self.at_B] = k_BLKH[:, 0]
        values_RKTH[self.rows, :, self.at_B] = v_BLKH[:, 0]
        return self.key_range.attend(q_BLNH, keys_RKTH, values_RKTH)


class MaskedKeys:
    """What a static step of `num` rows looks at: the first `length` tokens of each, less what lies past its own."""

    def __init__(self, *, num: int, length: int, device: torch.device, dtype: torch.dtype):
        self.num, self.length, self.dtype = num, length, dtype
        self.columns = torch.arange(length, device=device)
        self.bias_B11T: Tensor | None = None

    def begin(self, positions_B1: Tensor) -> None:
        self.bias_B11T = _bias(positions_B1, self.columns, self.dtype)[:, None, None]

    def attend(self, q_B1NH: Tensor, keys_RKTH: Tensor, values_RKTH: Tensor) -> Tensor:
        keys, values = keys_RKTH[: self.num, :, : self.length], values_RKTH[: self.num, :, : self.length]
        return _attend_one(q_B1NH, keys, values, self.bias_B11T)


def _attend_one(q_B1NH: Tensor, keys_BKTH: Tensor, values_BKTH: Tensor, bias_B11T: Tensor | None) -> Tensor:
    # The G query heads of a KV head stand in for query positions: no key is copied G times.
    q_BKGH = q_B1NH.reshape(*keys_BKTH.shape[:2], -1, q_B1NH.shape[-1])
    out_BKGH = F.scaled_dot_product_attention(q_BKGH, keys_BKTH, values_BKTH, attn_mask=bias_B11T)
    return out_BKGH.reshape(q_B1NH.shape)


def _bias(positions: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, else -inf, in attention's dtype: of a boolean each layer would make one of these."""
    hidden = columns > positions.view(-1, 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attention_kernels(device: torch.device) -> AbstractContextManager:
    """What attention inside may choose from: on a GPU not cuDNN's.

    It makes a plan for every new length, and on Blackwell it may be wrong for fewer than 8 KV heads (pytorch#193893).
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class KVCache:
    """The rows of all layers; `step` is what the forward pass under way does with them."""

    def __init__(self, *, rows: int, room: int):
        self.rows, self.room = rows, room
        self.step: Step | None = None
        self.layers: list[tuple[Tensor, Tensor]] = []

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make `target` hold the first `length` tokens of `source`."""
        for kept_RKTH in (kept for layer in self.layers for kept in layer):
            kept_RKTH[target, :, :length] = kept_RKTH[source, :, :length]


class CachedAttention(nn.Module):
    """Causal attention of the new tokens over everything seen so far, which it remembers."""

    def __init__(self, cache: KVCache, keys_RKTH: Tensor, values_RKTH: Tensor):
        super().__init__()
        self.cache = cache
        self.keys_RKTH, self.values_RKTH = keys_RKTH, values_RKTH

    def forward(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        return self.cache.step.attend(self.keys_RKTH, self.values_RKTH, q_BLNH, k_BLKH, v_BLKH)


def attach_cache(
    model: nn.Module, *, rows: int, room: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Give every layer of `model` an empty cache of `rows` × `room` tokens for the KV heads that this rank holds."""
    cache = KVCache(rows=rows, room=room)
    for layer in model.layers.values():
        attention = layer.attention
        keys, values = (_zeros(rows, num_kv_heads, room, attention.head_dim, dtype, device) for _ in range(2))
        attention.inner_attention = CachedAttention(cache, keys, values)
        cache.layers.append((keys, values))
    return cache


def _zeros(rows: int, num_kv_heads: int, room: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [R, K, T, H] and not what lies there: a masked key still counts 0 times its value, and 0 × NaN is NaN.

    On a GPU token by token, as its kernels take them. On a CPU head by head, and the system's own: memory is taken as
    tokens come, not for all that there is room for.
    """
    if device.type != "cpu":
        return torch.zeros(rows, room, num_kv_heads, head_dim, dtype=dtype, device=device).transpose(1, 2)
    shape = (rows, num_kv_heads, room, head_dim)
    return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
