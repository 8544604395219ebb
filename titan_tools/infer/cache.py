"""The key/value cache, behind the model's attention seam: preallocated once, written in place.

Shape letters: B batch, L new tokens, T tokens the cache has room for, N query heads, K key/value heads, G = N/K query
heads per key/value head, H head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KVCache:
    """How many tokens the layers hold. One number for all layers; `generate` moves it on after each forward."""

    def __init__(self, *, room: int):
        self.length = 0
        self.room = room


class CachedAttention(nn.Module):
    """Causal attention of the new tokens over everything seen so far, which it remembers."""

    def __init__(self, cache: KVCache, keys_BKTH: Tensor, values_BKTH: Tensor):
        super().__init__()
        self.cache = cache
        self.keys_BKTH, self.values_BKTH = keys_BKTH, values_BKTH

    def forward(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        start, num_new = self.cache.length, q_BLNH.shape[1]
        end = start + num_new
        self.keys_BKTH[:, :, start:end] = k_BLKH.transpose(1, 2)
        self.values_BKTH[:, :, start:end] = v_BLKH.transpose(1, 2)
        keys, values = self.keys_BKTH[:, :, :end], self.values_BKTH[:, :, :end]
        if num_new == 1:
            # The G query heads of a KV head stand in for query positions: no mask, and no key is copied G times.
            q_BKGH = q_BLNH.squeeze(1).unflatten(1, (keys.shape[1], -1))
            return F.scaled_dot_product_attention(q_BKGH, keys, values).flatten(1, 2).unsqueeze(1)
        q_BNLH = q_BLNH.transpose(1, 2)
        grouped = q_BNLH.shape[1] != keys.shape[1]
        if start == 0:
            out_BNLH = F.scaled_dot_product_attention(q_BNLH, keys, values, is_causal=True, enable_gqa=grouped)
        else:  # `is_causal` would count the query positions from 0
            at = torch.arange(end, device=q_BLNH.device)
            seen_LT = at <= at[start:, None]
            out_BNLH = F.scaled_dot_product_attention(q_BNLH, keys, values, attn_mask=seen_LT, enable_gqa=grouped)
        return out_BNLH.transpose(1, 2)


def attach_cache(model: nn.Module, *, room: int, batch: int = 1) -> KVCache:
    """Give every layer of `model` an empty cache for `room` tokens and the key/value heads that this rank holds."""
    cache = KVCache(room=room)
    for layer in model.layers.values():
        attention = layer.attention
        weight = attention.wk.weight  # its rows, device and dtype are the cache's
        shape = (batch, weight.shape[0] // attention.head_dim, room, attention.head_dim)
        attention.inner_attention = CachedAttention(cache, weight.new_empty(shape), weight.new_empty(shape))
    return cache
