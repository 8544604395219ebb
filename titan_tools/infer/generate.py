"""Continue prompts: each is put into a free row of the engine, all rows decode together, an ended one makes room."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from titan_tools.infer.engine import Engine
from titan_tools.infer.logprobs import TokenLogprobs, token_logprobs
from titan_tools.infer.prompts import Prompt
from titan_tools.infer.sampling import Sampling, Seat, choose
from titan_tools.infer.text_stream import TextStream
from titan_tools.infer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Settings:
    """How sequences are continued; the same for all of a run."""

    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None  # alternatives told beside each token
    samples: int = 1  # of each prompt


@dataclass(frozen=True, slots=True)
class Completion:
    """What came after a prompt: `tokens` with the stop token that ended them, `text` without."""

    prompt: Prompt
    sample: int
    tokens: list[int]
    text: str
    finish_reason: str  # "stop": a stop token or string; "length": the limit
    logprobs: list[TokenLogprobs] | None


@dataclass(slots=True)
class Timings:
    """Where the time of a run went; filled while it runs."""

    first_token_secs: list[float] = field(default_factory=list)  # of each prefill: prompt to first token
    decode_secs: float = 0.0
    num_decode_steps: int = 0
    num_decoded: int = 0  # tokens that these steps made
    num_tokens: int = 0  # all new ones
    cache_tokens_read: int = 0  # keys that decode steps looked at, summed over steps and rows


@dataclass(slots=True)
class _Sequence:
    prompt: Prompt
    sample: int
    limit: int
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


def generate(
    engine: Engine,
    prompts: Iterable[Prompt],
    settings: Settings,
    vocabulary: Vocabulary,
    *,
    timings: Timings | None = None,
    on_text: Callable[[str], None] | None = None,
    keep: int = 0,
) -> Iterator[Completion]:
    """Completions in the order in which they end. `on_text` hears of text as soon as it is sure; one row only.

    `keep`: leading tokens of the one prompt that row 0 holds already.
    """
    timings = timings or Timings()
    waiting = ((prompt, sample) for prompt in prompts for sample in range(settings.samples))
    active: list[_Sequence] = []
    while True:
        while len(active) < engine.rows and (following := next(waiting, None)):
            started = perf_counter()
            sequence = _begin(*following, engine, settings, vocabulary)
            logits_V = engine.prefill(len(active), sequence.prompt.tokens, keep=keep)
            _extend([sequence], logits_V[None], settings, on_text)
            timings.first_token_secs.append(perf_counter() - started)
            timings.num_tokens += 1
            if sequence.finish_reason:
                yield _completion(sequence, settings, on_text)
            else:
                active.append(sequence)
        if not active:
            return
        started = perf_counter()
        logits_BV = engine.decode([s.tokens[-1] for s in active])
        _extend(active, logits_BV, settings, on_text)
        timings.decode_secs += perf_counter() - started
        timings.num_decode_steps += 1
        timings.num_decoded += len(active)
        timings.num_tokens += len(active)
        timings.cache_tokens_read += sum(engine.lengths[: len(active)])
        for row in reversed(range(len(active))):
            if active[row].finish_reason:
                ended, last = active[row], active.pop()
                if row < len(active):  # rows at work stay the first ones
                    engine.copy_row(len(active), row)
                    active[row] = last
                yield _completion(ended, settings, on_text)


def _begin(prompt: Prompt, sample: int, engine: Engine, settings: Settings, vocabulary: Vocabulary) -> _Sequence:
    limit = min(settings.max_new_tokens, engine.room - len(prompt.tokens))
    return _Sequence(prompt, sample, limit, TextStream(vocabulary, settings.stop_ids, settings.stop_strings))


def _extend(
    sequences: list[_Sequence], logits_BV: Tensor, settings: Settings, on_text: Callable[[str], None] | None
) -> None:
    """Choose and append the next token of each sequence, and say which of them end with it."""
    seats = [Seat(s.prompt.id, s.sample, len(s.prompt.tokens) + len(s.tokens)) for s in sequences]
    seen_BV = None
    if settings.sampling.repetition_penalty != 1:
        seen_BV = torch.zeros(logits_BV.shape, dtype=torch.bool, device=logits_BV.device)
        for row, s in enumerate(sequences):
            seen_BV[row, s.prompt.tokens + s.tokens] = True
    tokens = choose(logits_BV, settings.sampling, seats, seen_BV=seen_BV)
    if settings.logprobs is not None:
        for s, told in zip(sequences, token_logprobs(logits_BV, tokens, settings.logprobs), strict=True):
            s.logprobs.append(told)
    for s, token in zip(sequences, tokens, strict=True):
        s.tokens.append(token)
        text = s.stream.add(token)
        if on_text and text:
            on_text(text)
        if token in settings.stop_ids or s.stream.stopped:
            s.finish_reason = "stop"
        elif len(s.tokens) == s.limit:
            s.finish_reason = "length"


def _completion(s: _Sequence, settings: Settings, on_text: Callable[[str], None] | None) -> Completion:
    rest = s.stream.finish()
    if on_text and rest:
        on_text(rest)
    logprobs = s.logprobs if settings.logprobs is not None else None
    return Completion(s.prompt, s.sample, s.tokens, s.stream.text, s.finish_reason, logprobs)
