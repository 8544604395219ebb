"""The model's logits for the tokens of given texts, of any length, in windows of the model's context.

The memory of the logits is bounded: a vocabulary of 128k over a pass of 2048 positions would take 1 GiB.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.common.sizes import MIB
from titan_tools.infer.decoding.engine import LEAST_SHARED, Engine, RowTokens, num_common

LOGITS_BYTES = 64 * MIB  # of fp32 logits at a time; what is computed from them takes as much again


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text of which the tokens from `first` (at least 1) on are scored; they stand for `num_bytes` of text."""

    id: str | int
    prompt: str
    completion: str | None  # None: the prompt itself is scored
    tokens: "array[int]"  # 4 bytes each; in a list they would take 36
    first: int
    num_bytes: int


def windows(num_tokens: int, *, first: int, context: int) -> Iterator[range]:
    """Split a text whose tokens from `first` on (at least 1) are to be predicted, each once, into forward passes.

    A range holds the tokens of one pass: the model reads all but its last one, at most `context` of them, and predicts
    those that no earlier range held (of the first range: those from `first` on). Every predicted token follows at least
    half a context, or all there is. A range that ends the text begins as early as it can.
    """
    while first < num_tokens:
        start = max(0, min(num_tokens - 1 - context, first - (context + 1) // 2))
        end = min(start + context + 1, num_tokens)
        yield range(start, end)
        first = end


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive predicted tokens of a text."""

    text: ScoredText
    targets: list[int]


class Likelihood:
    """Reads texts through row 0 of an engine, which keeps a beginning that the next texts share.

    Short texts share a forward pass. The windows of a long text, but for the first, begin in its middle, without a
    begin-of-text token, as sequences do in training.
    """

    def __init__(self, engine: Engine, *, context: int, vocab_size: int):
        self.engine, self.context = engine, context
        self._num_positions = max(1, LOGITS_BYTES // (4 * vocab_size))  # whose logits are computed at a time

    def logits(self, texts: Iterable[ScoredText]) -> Iterator[tuple[list[Piece], Tensor]]:
        """The predicted tokens of all texts in order, some at a time, with the fp32 logits [P, V] that predict them."""
        ahead: list[tuple[Piece, Tensor]] = []
        for piece, hidden_PD in self._hidden(texts):
            if sum(len(earlier.targets) for earlier, _ in ahead) + len(piece.targets) > self._num_positions:
                yield self._with_logits(ahead)
                ahead = []
            ahead.append((piece, hidden_PD))
        if ahead:
            yield self._with_logits(ahead)

    @torch.inference_mode()
    def _with_logits(self, ahead: list[tuple[Piece, Tensor]]) -> tuple[list[Piece], Tensor]:
        hidden_PD = torch.cat([hidden_PD for _, hidden_PD in ahead])
        return [piece for piece, _ in ahead], self.engine.model.head(hidden_PD).float()

    def _hidden(self, texts: Iterable[ScoredText]) -> Iterator[tuple[Piece, Tensor]]:
        for together in self._passes(texts):
            if len(together) == 1:
                yield from self._hidden_in_windows(together[0][0])
                continue
            hidden_LD = self.engine.hidden_of_all([one for _, one in together])
            parts = torch.split(hidden_LD, [one.num_new for _, one in together])
            for (text, one), part_LD in zip(together, parts, strict=True):
                yield from self._cut(text, part_LD, first=text.first, position=one.keep)

    def _hidden_in_windows(self, text: ScoredText) -> Iterator[tuple[Piece, Tensor]]:
        first = text.first
        for window in windows(len(text.tokens), first=first, context=self.context):
            inputs = list(text.tokens[window.start : window.stop - 1])
            unpredicted = inputs[: first - window.start - 1]
            position = self._keep(unpredicted)
            for hidden_LD in self.engine.hidden(0, inputs, keep=position, mark=len(unpredicted)):
                yield from self._cut(text, hidden_LD, first=first, position=window.start + position)
                position += len(hidden_LD)
            first = window.stop

    def _cut(self, text: ScoredText, hidden_LD: Tensor, *, first: int, position: int) -> Iterator[tuple[Piece, Tensor]]:
        """Pieces of the tokens from `first` on, given the hidden states of the tokens from `position` on."""
        end = position + len(hidden_LD)
        for start in range(max(position, first - 1), end, self._num_positions):
            stop = min(start + self._num_positions, end)
            yield Piece(text, list(text.tokens[start + 1 : stop + 1])), hidden_LD[start - position : stop - position]

    def _passes(self, texts: Iterable[ScoredText]) -> Iterator[list[tuple[ScoredText, RowTokens]]]:
        """Texts in order, as many as fit one pass, which must be done before the next one is requested."""
        together: list[tuple[ScoredText, RowTokens]] = []
        for text in texts:
            inputs = list(text.tokens[:-1])
            if together and not self._joins(text, inputs, [one for _, one in together]):
                yield together
                together = []
            keep = together[0][1].keep if together else self._keep(inputs[: text.first - 1])
            together.append((text, RowTokens(0, inputs, keep, mark=text.first - 1)))
        if together:
            yield together

    def _joins(self, text: ScoredText, inputs: list[int], others: list[RowTokens]) -> bool:
        """Whether a text can share a pass with others without computing anything twice."""
        keep, unpredicted = others[0].keep, inputs[: text.first - 1]
        num_held = self.engine.num_usable(0, unpredicted)
        num_shared = max(num_common(unpredicted, other.tokens) for other in others)
        return (
            num_held >= keep
            and max(num_held, num_shared) - keep < LEAST_SHARED[self.engine.model.device.type]
            and max(len(inputs), len(others[0].tokens)) <= self.context
            and self.engine.fit_one_pass([*others, RowTokens(0, inputs, keep)])
        )

    def _keep(self, unpredicted: list[int]) -> int:
        """How many leading tokens are in the cache already: those that completions of one prompt share."""
        num_held = self.engine.num_usable(0, unpredicted)
        return num_held if num_held >= LEAST_SHARED[self.engine.model.device.type] else 0
