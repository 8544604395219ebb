"""Continue prompts: each is put into a free row of the engine, all rows decode together, an ended one makes room."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.logprobs import TokenLogprobs, token_logprobs
from titan_tools.infer.decoding.sampling import Sampling, Seat, choose
from titan_tools.infer.text.prompts import Prompt
from titan_tools.infer.text.text_stream import TextStream
from titan_tools.infer.text.vocabulary import Vocabulary


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
    prepare_secs: float = 0.0  # compiling and recording decode steps, once for each shape
    decode_secs: float = 0.0
    num_decode_steps: int = 0
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


@dataclass(slots=True)
class _Prefilled:
    """The latest prompt: the row that holds it, and the logits of its last token."""

    row: int
    logits_V: Tensor


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
    run = _Run(engine, settings, vocabulary, timings or Timings(), on_text)
    waiting = ((prompt, sample) for prompt in prompts for sample in range(settings.samples))

    def begin_next(row: int) -> Iterator[Completion]:
        """Put the next that does not end at its first token into a row, and return it."""
        for prompt, sample in waiting:
            sequence = run.begin(row, prompt, sample, keep=keep)
            if not sequence.finish_reason:
                return sequence
            yield run.completion(sequence)
        return None

    active: list[_Sequence] = []  # each in the engine's row of its number
    while len(active) < engine.rows and (sequence := (yield from begin_next(len(active)))):
        active.append(sequence)
    while active:
        run.step(active)
        for row in reversed(range(len(active))):  # so that the last one, which may move, is not one that ended
            if not active[row].finish_reason:
                continue
            yield run.completion(active[row])
            if following := (yield from begin_next(row)):
                active[row] = following
                continue
            last = active.pop()
            if row < len(active):  # rows at work stay the first ones
                run.move(len(active), row)
                active[row] = last


class _Run:
    """What all sequences share: the engine, the settings, the clock, and what they have from each other."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        vocabulary: Vocabulary,
        timings: Timings,
        on_text: Callable[[str], None] | None,
    ):
        self.engine, self.settings, self.vocabulary = engine, settings, vocabulary
        self.timings, self.on_text = timings, on_text
        self.latest: _Prefilled | None = None
        self.seen_RV: Tensor | None = None  # tokens of each row, which a repetition penalty is for

    def begin(self, row: int, prompt: Prompt, sample: int, *, keep: int) -> _Sequence:
        """Put a prompt into a row and choose its first token. Later samples copy the row of the one before them.

        That row is whole: nothing begins between samples of a prompt, and no row moves while something waits.
        """
        engine, settings, timings = self.engine, self.settings, self.timings
        limit = min(settings.max_new_tokens, engine.room - len(prompt.tokens))
        stream = TextStream(self.vocabulary, settings.stop_ids, settings.stop_strings, after=prompt.tokens)
        sequence = _Sequence(prompt, sample, limit, stream)
        started = perf_counter()
        if sample:
            engine.copy_row(self.latest.row, row, length=len(prompt.tokens))
            self.latest.row = row
        else:
            self.latest = _Prefilled(row, engine.prefill(row, prompt.tokens, keep=keep))
        if settings.sampling.repetition_penalty != 1:
            self._see_prompt(row, prompt)
        self._extend(slice(row, row + 1), [sequence], self.latest.logits_V[None])
        timings.num_tokens += 1
        if not sample:
            timings.first_token_secs.append(perf_counter() - started)
        return sequence

    def step(self, active: list[_Sequence]) -> None:
        """One more token for each of the sequences at work."""
        timings, num = self.timings, len(active)
        started = perf_counter()
        self.engine.prepare_decode(num)
        prepared = perf_counter()
        logits_BV = self.engine.decode([s.tokens[-1] for s in active])
        self._extend(slice(num), active, logits_BV)
        timings.prepare_secs += prepared - started
        timings.decode_secs += perf_counter() - prepared
        timings.num_decode_steps += 1
        timings.num_tokens += num
        timings.cache_tokens_read += sum(self.engine.lengths(num))

    def move(self, source: int, target: int) -> None:
        """Take everything of a row to another."""
        self.engine.copy_row(source, target)
        if self.seen_RV is not None:
            self.seen_RV[target] = self.seen_RV[source]

    def completion(self, s: _Sequence) -> Completion:
        """What came of a sequence that ended."""
        rest = s.stream.finish()
        if self.on_text and rest:
            self.on_text(rest)
        logprobs = s.logprobs if self.settings.logprobs is not None else None
        return Completion(s.prompt, s.sample, s.tokens, s.stream.text, s.finish_reason, logprobs)

    def _see_prompt(self, row: int, prompt: Prompt) -> None:
        logits_V = self.latest.logits_V
        if self.seen_RV is None:
            self.seen_RV = torch.zeros(self.engine.rows, len(logits_V), dtype=torch.bool, device=logits_V.device)
        self.seen_RV[row] = False
        self.seen_RV[row, prompt.tokens] = True

    def _extend(self, rows: slice, sequences: list[_Sequence], logits_BV: Tensor) -> None:
        """Choose and append the next token of each sequence, and say which of them end with it."""
        settings = self.settings
        seats = [Seat(s.prompt.id, s.sample, len(s.prompt.tokens) + len(s.tokens)) for s in sequences]
        seen_BV = None if self.seen_RV is None else self.seen_RV[rows]
        tokens = choose(logits_BV, settings.sampling, seats, seen_BV=seen_BV)
        if seen_BV is not None:
            seen_BV[range(len(tokens)), tokens] = True
        if settings.logprobs is not None:
            for s, told in zip(sequences, token_logprobs(logits_BV, tokens, settings.logprobs), strict=True):
                s.logprobs.append(told)
        for s, token in zip(sequences, tokens, strict=True):
            s.tokens.append(token)
            text = s.stream.add(token)
            if self.on_text and text:
                self.on_text(text)
            if token in settings.stop_ids or s.stream.stopped:
                s.finish_reason = "stop"
            elif len(s.tokens) == s.limit:
                s.finish_reason = "length"
