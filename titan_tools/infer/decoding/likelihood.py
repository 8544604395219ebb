"""The model's logits for tokens that are there already: texts of any length, in windows of the model's context.

The memory that logits take is bounded: a vocabulary of 128k over a piece of 2048 positions would be 1 GiB.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from titan_tools.infer.decoding.engine import Engine

LOGITS_BYTES = 64 * 1024**2  # of fp32 logits at a time; what is computed from them takes as much again


def windows(num_tokens: int, *, first: int, context: int) -> Iterator[range]:
    """Cut a text whose tokens from `first` on (at least 1) are to be predicted, each once, into forward passes.

    A range holds the tokens of one pass: the model reads all but its last one, at most `context` of them, and predicts
    those that no range before it held (of the first range: those from `first` on). Every predicted token stands behind
    at least half a context, or behind all there is. A range that ends the text begins as early as it can.
    """
    while first < num_tokens:
        start = max(0, min(num_tokens - 1 - context, first - (context + 1) // 2))
        end = min(start + context + 1, num_tokens)
        yield range(start, end)
        first = end


class Likelihood:
    """Reads texts through row 0 of an engine, which keeps a beginning that the next text shares.

    Windows after a text's first begin in its middle, without a begin-of-text token, as sequences in training do.
    """

    def __init__(self, engine: Engine, *, context: int, vocab_size: int):
        self.engine, self.context = engine, context
        self._num_positions = max(1, LOGITS_BYTES // (4 * vocab_size))  # whose logits are made at a time

    def logits(self, tokens: Sequence[int], *, first: int) -> Iterator[tuple[list[int], Tensor]]:
        """The tokens from `first` on, a few after another, with the fp32 logits [P, V] that predict them."""
        for window in windows(len(tokens), first=first, context=self.context):
            for targets, hidden_PD in self._hidden(tokens[window.start : window.stop], first=first - window.start):
                with torch.inference_mode():
                    logits_PV = self.engine.model.head(hidden_PD).float()
                yield targets, logits_PV
            first = window.stop

    def _hidden(self, tokens: Sequence[int], *, first: int) -> Iterator[tuple[list[int], Tensor]]:
        inputs = list(tokens[:-1])
        held = self._keep(inputs, most=first - 1)
        position = held
        for hidden_LD in self.engine.hidden(0, inputs, keep=held):
            end = position + len(hidden_LD)
            for start in range(max(position, first - 1), end, self._num_positions):
                stop = min(start + self._num_positions, end)
                yield list(tokens[start + 1 : stop + 1]), hidden_LD[start - position : stop - position]
            position = end

    def _keep(self, inputs: list[int], *, most: int) -> int:
        """How many leading tokens need not be read again: those of several completions of one prompt."""
        pairs = zip(inputs[:most], self.engine.held[0], strict=False)
        num_alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return num_alike if 2 * num_alike >= len(inputs) else 0
