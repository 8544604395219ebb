"""The key/value cache: preallocated once, written in place, and for windows and chunks no longer than those.

Shape letters: R rows of the cache (sequences), B active rows, L new tokens, T tokens of a row that are attended to,
N query heads, K key/value heads, G = N/K query heads per key/value head, H head dim.
"""

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from titan_tools.infer.model.latent_attention import LatentAttention
from titan_tools.infer.model.reach import MOST_MARKS, Reach


class Softmax(NamedTuple):
    """How scores become weights: their factor, by default H ** -0.5, and the sinks of the heads."""

    scale: float | None = None
    sinks_N: Tensor | None = None


PLAIN = Softmax()


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer. One tensor is both where the values are a part of the keys (latent attention)."""

    keys_RKTH: Tensor
    values_RKTH: Tensor
    reach: Reach
    # Keys and values [1, N, T, ·] of many new tokens' attention, from a row's cached keys [1, K, T, H]
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.keys_RKTH] if self.values_RKTH is self.keys_RKTH else [self.keys_RKTH, self.values_RKTH]

    def write(self, index: Any, k: Tensor, v: Tensor) -> None:
        """Store new tokens at an index of both tensors."""
        for cached_RKTH, new in zip(self.tensors, (k, v), strict=False):
            cached_RKTH[index] = new

    def put(self, row: int, start: int, k_1KLH: Tensor, v_1KLH: Tensor) -> None:
        """Store the tokens from `start` on in their slots, of which the last ones stay."""
        num = k_1KLH.shape[2]
        first = max(0, num - self.reach.size)
        self.write(
            (row, slice(None), self._slots(start + first, start + num)), k_1KLH[0, :, first:], v_1KLH[0, :, first:]
        )

    def at(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, K, T, H] of positions `start` to `end` - 1, which must be there."""
        slots = self._slots(start, end)
        return self.keys_RKTH[row : row + 1, :, slots], self.values_RKTH[row : row + 1, :, slots]

    def _slots(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self.keys_RKTH.device) % self.reach.size


class CacheStep(Protocol):
    """How one forward pass uses the cache of each layer."""

    positions: Tensor  # [L] or [B, L], of the new tokens

    expands: bool  # whether keys and values are those of `LayerCache.expand`

    def attend(
        self, layer: LayerCache, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, softmax: Softmax = PLAIN
    ) -> Tensor:
        """Store the new keys and values, and attend over all that a sequence may see: out_BLNH."""


Mark = Sequence[tuple[Tensor, Tensor]]  # keys and values [1, K, T, H] of each layer with a window


class KVCache:
    """The rows of all layers; `step` says how the current forward pass uses them.

    A layer with a window or chunks has overwritten what a row's earlier tokens saw, so a row can be cut back to where
    all of its layers still have what follows needs: `usable`. `marks` are copies of the windows after so many tokens of
    a row, made where a row is likely to be cut to: the end of its prompt, and where its prompt and an earlier one part.
    """

    def __init__(self, *, rows: int, room: int):
        self.rows, self.room = rows, room
        self.step: CacheStep | None = None
        self.layers: list[LayerCache] = []
        self.marks: list[dict[int, Mark]] = [{} for _ in range(rows)]
        self._written = [0] * rows  # positions of a row that were written since it began, also those cut off later

    @property
    def reaches(self) -> list[Reach]:
        """The different reaches of the layers."""
        return list(dict.fromkeys(layer.reach for layer in self.layers))

    @property
    def has_windows(self) -> bool:
        return any(reach.is_window for reach in self.reaches)

    def usable(self, row: int, num: int) -> int:
        """The most of the first `num` tokens of a row behind which it can be continued."""
        starts = (reach.chunk_start(num) for reach in self.reaches)
        near = (at for mark in self.marks[row] for at in (mark - 1, mark))
        return max(at for at in (0, num, *starts, *near) if at <= num and self._holds(row, at))

    def _holds(self, row: int, num: int) -> bool:
        marked = self._mark_of(row, num) is not None
        written = self._written[row]
        return num == 0 or all(
            reach.is_window and marked or reach.holds(num, written=written) for reach in self.reaches
        )

    def _mark_of(self, row: int, num: int) -> int | None:
        """The mark that has the windows of the token after the first `num`."""
        return next((at for at in (num, num + 1) if at in self.marks[row]), None)

    def cut(self, row: int, num: int) -> None:
        """Let a row have its first `num` tokens only, which must be usable."""
        assert self._holds(row, num)
        if num == 0:
            self._written[row] = 0
        elif not all(reach.holds(num, written=self._written[row]) for reach in self.reaches):
            at = self._mark_of(row, num)
            assert at is not None
            for layer, (k_1KTH, v_1KTH) in zip(self._windows(), self.marks[row][at], strict=True):
                layer.put(row, at - k_1KTH.shape[2], k_1KTH, v_1KTH)
            self._written[row] = at
        self.marks[row] = {at: mark for at, mark in self.marks[row].items() if at <= num}

    def will_write(self, row: int, end: int) -> None:
        """Positions up to `end` - 1 are written next; an interruption may leave some of them."""
        self._written[row] = max(self._written[row], end)

    def has_written(self, row: int, end: int, marks: dict[int, Mark]) -> None:
        """A pass has given a row tokens up to position `end` - 1, and its marks."""
        self._written[row] = end
        self.marks[row] = dict(sorted((self.marks[row] | marks).items())[-MOST_MARKS:])

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Set row `target` to the first `length` tokens of row `source`, which must be usable."""
        written = self._written[source]
        for layer in self.layers:
            slots = slice(length if written <= layer.reach.size else layer.reach.size)
            for cached_RKTH in layer.tensors:
                cached_RKTH[target, :, slots] = cached_RKTH[source, :, slots]
        self._written[target], self.marks[target] = written, self.marks[source]
        self.cut(target, length)

    def _windows(self) -> Iterable[LayerCache]:
        return (layer for layer in self.layers if layer.reach.is_window)


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

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        scale: float | None = None,
        *,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        assert self.cache.step is not None
        return self.cache.step.attend(self.layer, q_BLNH, k_BLKH, v_BLKH, Softmax(scale, sinks_N))


def attach_cache(
    model: nn.Module,
    *,
    rows: int,
    room: int,
    reaches: Sequence[Reach],
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Give every layer of `model` an empty cache for the KV heads that this rank holds.

    It has `rows` sequences of `room` tokens; a layer stores as many of each as its reach of `reaches` has slots.
    """
    cache = KVCache(rows=rows, room=room)
    layers: Any = model.layers
    same: dict[Reach, Reach] = {}  # torch's compiler compares them by identity, and would compile other layers again
    for layer, reach in zip(layers.values(), (same.setdefault(reach, reach) for reach in reaches), strict=True):
        attention = layer.attention
        keys = _zeros(rows, num_kv_heads, reach.size, attention.head_dim, dtype, device)
        if isinstance(attention, LatentAttention):
            made = LayerCache(keys, keys, reach, attention.expand)
        else:
            made = LayerCache(keys, _zeros(rows, num_kv_heads, reach.size, attention.head_dim, dtype, device), reach)
        attention.inner_attention = CachedAttention(cache, made)
        cache.layers.append(made)
    # `cut` to a mark restores windows alone, and one number per row says what all layers have
    assert not cache.has_windows or all(reach.is_window or reach.size >= room for reach in cache.reaches)
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
