"""The tasks of `titan infer` (one prompt, a batch, a conversation, scoring): their interface and their input."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from converters.families.args import DecoderArgs
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import GenerationSettings
from titan_tools.infer.identity import Origin
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import Request
from titan_tools.infer.text.chat_template import ChatTemplate
from titan_tools.infer.text.chat_tokens import turn_end_ids
from titan_tools.infer.text.vocabulary import Vocabulary

_ROWS_ON_CPU, _ROWS_ON_GPU = 8, 32


@dataclass(frozen=True, slots=True)
class Work:
    """A request, and what file headers and tokenizer say, before ranks start and weights are read."""

    request: Request
    args: DecoderArgs
    vocabulary: Vocabulary
    template: ChatTemplate | None  # with --chat
    tp: int
    dtype: str
    tokenizer_folder: Path
    origin: Origin | None = None  # with --out, and with several ranks
    stored: str | None = None  # the format of weights that --quantize stored keeps

    @property
    def weights_dtype(self) -> str:
        """Dtype of the weights in memory: the format of quantized ones, else the dtype of the computation."""
        return self.stored or self.request.quantize or self.dtype


class Task(Protocol):
    """Made from `Work` by the `prepare_…` function of its file, which raises if the request cannot be fulfilled."""

    @property
    def rows(self) -> int:
        """Sequences that decode together; 0 if an earlier run has left nothing to do (known to the first rank)."""

    @property
    def room(self) -> int:
        """Tokens of the longest sequence, new ones included."""

    @property
    def least_tokens(self) -> int:
        """Tokens of a sequence that is certainly computed, for a lower bound of the cache."""

    def run(self, engine: Engine | None, ranks: TPRanks) -> None:
        """Called on all ranks; the first one prints. The engine is None if `rows` is 0."""


def generation_settings(work: Work, *, max_new_tokens: int) -> GenerationSettings:
    """The settings of `generate`, from the request and the checkpoint's stop tokens."""
    request, vocabulary = work.request, work.vocabulary
    stop_ids = vocabulary.stop_ids
    if work.template is not None:
        stop_ids |= turn_end_ids(work.template, vocabulary.tokenizer)
    return GenerationSettings(
        max_new_tokens=max_new_tokens,
        sampling=request.sampling,
        stop_ids=frozenset() if request.ignore_eos else stop_ids,
        stop_strings=(*request.stop, *vocabulary.stop_strings),
        logprobs=request.logprobs,
        samples=request.samples,
    )


def num_rows(request: Request, num_sequences: int) -> int:
    """Sequences that decode together if memory allows: --batch-size, by default 8 on a CPU and 32 on a GPU."""
    return min(num_sequences, request.batch_size or (_ROWS_ON_GPU if torch.cuda.is_available() else _ROWS_ON_CPU))
