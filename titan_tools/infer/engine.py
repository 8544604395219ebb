"""Forward passes of a loaded model over sequences of different lengths, each a row of one preallocated cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titan_tools.infer.cache import Decode, Prefill, Step, attach_cache
from titan_tools.infer.load import SlicedModel

PREFILL_TOKENS = 2048  # of one pass; a longer prompt goes through in pieces, so that its activations stay bounded


class Engine:
    """`rows` sequences of up to `room` tokens. With tp > 1 every rank makes the same calls and gets the same logits."""

    def __init__(self, model: SlicedModel, *, rows: int, room: int):
        self.model, self.rows, self.room = model, rows, room
        self.lengths = [0] * rows  # tokens that each row holds
        heads_dim = model.num_kv_heads * model.body.layers["0"].attention.head_dim
        self.bytes_per_cached_token = 2 * len(model.body.layers) * heads_dim * model.dtype.itemsize
        self._cache = attach_cache(model.body, rows=rows, room=room, num_kv_heads=model.num_kv_heads, dtype=model.dtype)

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Sequence[int], *, keep: int = 0) -> Tensor:
        """Put `tokens` into a row, whose first `keep` are there already; fp32 logits [V] of the last one."""
        for hidden_LD in self.hidden(row, tokens, keep=keep):
            last_D = hidden_LD[-1]
        return self.model.head(last_D[None])[0].float()

    def hidden(self, row: int, tokens: Sequence[int], *, keep: int = 0) -> Iterator[Tensor]:
        """As `prefill`, but what the head would see of every token from `keep` on: pieces [L, D], one after another."""
        for start in range(keep, len(tokens), PREFILL_TOKENS):
            piece = tokens[start : start + PREFILL_TOKENS]
            step = Prefill(row=row, start=start, num_new=len(piece), device=self.model.device)
            with torch.inference_mode():
                hidden_LD = self._forward(step, [piece])[0]
            self.lengths[row] = start + len(piece)
            yield hidden_LD

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each of the first rows; fp32 logits [B, V]."""
        num = len(tokens)
        hidden_BLD = self._forward(Decode(self.lengths[:num], device=self.model.device), [[t] for t in tokens])
        for row in range(num):
            self.lengths[row] += 1
        return self.model.head(hidden_BLD[:, -1]).float()

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, *, length: int | None = None) -> None:
        """Make a row hold the first `length` tokens (default: all) of another."""
        length = self.lengths[source] if length is None else length
        self._cache.copy_row(source, target, length)
        self.lengths[target] = length

    def _forward(self, step: Step, tokens: Sequence[Sequence[int]]) -> Tensor:
        self._cache.step = step
        return self.model.body(torch.tensor(tokens, device=self.model.device), step.positions)
