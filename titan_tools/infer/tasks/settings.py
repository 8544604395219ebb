"""How prompts are continued, and how many at a time, from what was asked and what the checkpoint says."""

import torch

from titan_tools.infer.decoding.generate import Settings
from titan_tools.infer.request import Request
from titan_tools.infer.task import Work
from titan_tools.infer.text.chat_tokens import turn_end_ids

_ROWS_ON_CPU, _ROWS_ON_GPU = 8, 32


def settings_of(work: Work, *, max_new_tokens: int) -> Settings:
    """How `generate` shall continue, from what was asked and from what the checkpoint says of its ends."""
    request, vocabulary = work.request, work.vocabulary
    stop_ids = vocabulary.stop_ids
    if work.template is not None:
        stop_ids |= turn_end_ids(work.template, vocabulary.tokenizer)
    return Settings(
        max_new_tokens=max_new_tokens,
        sampling=request.sampling,
        stop_ids=frozenset() if request.ignore_eos else stop_ids,
        stop_strings=(*request.stop, *vocabulary.stop_strings),
        logprobs=request.logprobs,
        samples=request.samples,
    )


def rows_of(request: Request, num_sequences: int) -> int:
    """Sequences at a time, where memory allows so many: --batch-size, else 8 on a CPU and 32 on a GPU."""
    return min(num_sequences, request.batch_size or (_ROWS_ON_GPU if torch.cuda.is_available() else _ROWS_ON_CPU))
