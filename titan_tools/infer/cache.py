"""The key/value cache, behind the model's attention seam: preallocated once, written in place.

Shape letters: R rows of the cache (sequences), B of them at work, L new tokens, T tokens a row has room for, N query
heads, K key/value heads, G = N/K query heads per key/value head, H head dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Step(Protocol):
    """What one forward pass does with a layer's cache."""

    positions: Tensor  # [L] or [B, L], of the new tokens

    def attend(self, keys_RKTH: Tensor, values_RKTH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        """Remember the new keys and values, and attend over all that a sequence may see: out_BLNH."""


class Prefill:
    """Tokens `start`, … of one row in one pass."""

    def __init__(self, *, row: int, start: int, num_new: int, device: torch.device):
        self.row, self.start, self.end = row, start, start + num_new
        self.positions = torch.arange(start, self.end, device=device)

    def attend(self, keys_RKTH: Tensor, values_RKTH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        row, start, end = self.row, self.start, self.end
        keys_RKTH[row, :, start:end] = k_BLKH[0].transpose(0, 1)
        values_RKTH[row, :, start:end] = v_BLKH[0].transpose(0, 1)
        keys, values = keys_RKTH[row : row + 1, :, :end], values_RKTH[row : row + 1, :, :end]
        q_BNLH = q_BLNH.transpose(1, 2)
        grouped = q_BNLH.shape[1] != keys.shape[1]
        if start == 0:
            out_BNLH = F.scaled_dot_product_attention(q_BNLH, keys, values, is_causal=True, enable_gqa=grouped)
        else:  # `is_causal` would count the query positions from 0
            seen_LT = torch.arange(end, device=keys.device) <= self.positions[:, None]
            out_BNLH = F.scaled_dot_product_attention(q_BNLH, keys, values, attn_mask=seen_LT, enable_gqa=grouped)
        return out_BNLH.transpose(1, 2)


class Decode:
    """One new token for each of the first B rows, which may be of different lengths."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device):
        self.end = max(lengths) + 1
        self.rows = torch.arange(len(lengths), device=device)
        self.at = torch.tensor(lengths, device=device)
        self.positions = self.at[:, None]
        is_ragged = min(lengths) != max(lengths)
        self.seen_B11T = (
            (torch.arange(self.end, device=device) <= self.at[:, None])[:, None, None] if is_ragged else None
        )

    def attend(self, keys_RKTH: Tensor, values_RKTH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        keys_RKTH[self.rows, :, self.at] = k_BLKH[:, 0]
        values_RKTH[self.rows, :, self.at] = v_BLKH[:, 0]
        num = len(self.rows)
        keys, values = keys_RKTH[:num, :, : self.end], values_RKTH[:num, :, : self.end]
        # The G query heads of a KV head stand in for query positions: no key is copied G times.
        q_BKGH = q_BLNH.squeeze(1).unflatten(1, (keys.shape[1], -1))
        out_BKGH = F.scaled_dot_product_attention(q_BKGH, keys, values, attn_mask=self.seen_B11T)
        return out_BKGH.flatten(1, 2).unsqueeze(1)


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


def attach_cache(model: nn.Module, *, rows: int, room: int, num_kv_heads: int, dtype: torch.dtype) -> KVCache:
    """Give every layer of `model` an empty cache of `rows` × `room` tokens for the KV heads that this rank holds."""
    cache = KVCache(rows=rows, room=room)
    for layer in model.layers.values():
        attention = layer.attention
        shape = (rows, num_kv_heads, room, attention.head_dim)
        # Zeros: what a shorter row masks is multiplied by 0, and 0 times the NaN of fresh memory is NaN.
        keys, values = (torch.zeros(shape, dtype=dtype, device=layer.ffn_norm.weight.device) for _ in range(2))
        attention.inner_attention = CachedAttention(cache, keys, values)
        cache.layers.append((keys, values))
    return cache
