"""Continuous batching: prompts enter free rows of the engine, all rows decode together, finished rows are reused."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from titan_tools.infer.decoding.engine import LEAST_SHARED, Engine, RowTokens, num_common
from titan_tools.infer.decoding.sampling import (
    NoiseKey,
    Sampling,
    TokenLogprobs,
    choose,
    require_finite,
    token_logprobs,
)
from titan_tools.infer.text.prompts import Prompt
from titan_tools.infer.text.text_stream import TextStream
from titan_tools.infer.text.vocabulary import Vocabulary

# New tokens of a pass from which on more prompts in it save nothing: up to there it takes as long as reading weights
_FULL_PASS_TOKENS = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How sequences are continued; the same for all of a run."""

    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None  # number of likeliest tokens reported with each token
    samples: int = 1  # of each prompt


@dataclass(frozen=True, slots=True)
class Completion:
    """The continuation of a prompt: `tokens` with the stop token that ended them, `text` without."""

    prompt: Prompt
    sample: int
    tokens: list[int]
    text: str
    finish_reason: str  # "stop": a stop token or string; "length": the limit
    logprobs: list[TokenLogprobs] | None


@dataclass(slots=True)
class Timings:
    """Where the time of a run went; filled while it runs."""

    first_token_secs: list[float] = field(default_factory=list)  # of each prompt, from the beginning of its prefill
    prepare_secs: float = 0.0  # compiling and recording decode steps, once for each shape
    decode_secs: float = 0.0
    num_decode_steps: int = 0
    num_tokens: int = 0  # all new ones
    cache_bytes_read: int = 0  # by decode steps on one rank
    expert_bytes_read: int = 0  # by decode steps on one rank


def generate(
    engine: Engine,
    prompts: Iterable[Prompt],
    settings: GenerationSettings,
    vocabulary: Vocabulary,
    *,
    timings: Timings | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Iterator[Completion]:
    """Completions in the order in which they finish. `on_text` gets text as soon as it is final; with one row only.

    A beginning of a prompt that is in the engine's cache is not computed again.
    """
    run = _Run(engine, prompts, settings, vocabulary, timings or Timings(), on_text)
    while True:
        while run.may_begin():
            run.begin()
            yield from run.take_finished()
        if not run.close_gaps():
            return
        run.step()
        yield from run.take_finished()


@dataclass(slots=True)
class _Prefilled:
    """A prompt that is computed once for all of its samples: the row that holds it, and its last token's logits."""

    row: int
    logits_V: Tensor | None = None


@dataclass(slots=True)
class _Sequence:
    prompt: Prompt
    sample: int
    limit: int
    stream: TextStream | None  # None: its text is decoded at the end
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


class _Run:
    """The active sequences, by the engine's row, and what they share."""

    def __init__(
        self,
        engine: Engine,
        prompts: Iterable[Prompt],
        settings: GenerationSettings,
        vocabulary: Vocabulary,
        timings: Timings,
        on_text: Callable[[str], None] | None,
    ):
        self.engine, self.settings, self.vocabulary = engine, settings, vocabulary
        self.timings, self.on_text = timings, on_text
        self.decodes_each_token = bool(on_text or settings.stop_strings)  # else a sequence's text at once
        self.queue = _PromptQueue(prompts, settings.samples, engine)
        self.active: dict[int, _Sequence] = {}
        self.latest: _Prefilled | None = None
        self.penalized_RV: Tensor | None = None  # the tokens of each row that a repetition penalty applies to

    @property
    def num_free(self) -> int:
        return self.engine.rows - len(self.active)

    @property
    def needs_logits(self) -> bool:
        """Whether tokens are not simply the likeliest ones, which the engine chooses itself."""
        sampling = self.settings.sampling
        is_likeliest = sampling.temperature == 0 and sampling.repetition_penalty == 1
        return not is_likeliest or self.settings.logprobs is not None

    def may_begin(self) -> bool:
        """Whether waiting prompts should begin now."""
        return self.queue.should_begin(self.num_free)

    def begin(self) -> None:
        """Put waiting prompts into free rows, as many as one pass takes, and choose their first tokens."""
        started = perf_counter()
        begun, to_prefill = self._fill_rows()
        if to_prefill:
            for one, logits_V in zip(to_prefill, self.engine.prefill_rows(to_prefill), strict=True):
                begun[one.row].logits_V = logits_V
        first_logits = []
        for row, prefilled in begun.items():
            prompt, logits_V = self.active[row].prompt, prefilled.logits_V
            assert logits_V is not None
            first_logits.append(logits_V)
            self.engine.copy_row(prefilled.row, row, length=len(prompt.tokens))
            if self.settings.sampling.repetition_penalty != 1:
                self._penalize(row, prompt, vocab_size=len(logits_V))
        self._choose([*begun], torch.stack(first_logits))
        self.queue.has_begun()
        self.timings.num_tokens += len(begun)
        self.timings.first_token_secs += [perf_counter() - started] * len(to_prefill)

    def step(self) -> None:
        """One more token for each of the active sequences, which are in the first rows."""
        timings, rows = self.timings, list(range(len(self.active)))
        started = perf_counter()
        self.engine.prepare_decode(len(rows))
        prepared = perf_counter()
        tokens = [self.active[row].tokens[-1] for row in rows]
        if self.needs_logits:
            self._choose(rows, self.engine.decode(tokens))
        else:
            found = self.engine.decode_likeliest(tokens, ahead=self._all_continue())
            self._extend(rows, require_finite(found, self._noise_keys(rows)))
        self.queue.has_stepped(self.num_free)
        timings.prepare_secs += prepared - started
        timings.decode_secs += perf_counter() - prepared
        timings.num_decode_steps += 1
        timings.num_tokens += len(rows)
        lengths = self.engine.lengths(len(rows))
        timings.cache_bytes_read += sum(self.engine.model.cache_bytes_seen(length) for length in lengths)
        timings.expert_bytes_read += self.engine.model.expert_bytes(len(rows))

    def take_finished(self) -> Iterator[Completion]:
        """The completions of finished sequences, whose rows become free."""
        for row in sorted(self.active):
            if self.active[row].finish_reason:
                yield self._completion(self.active.pop(row))

    def close_gaps(self) -> int:
        """Move the active sequences to the first rows; how many there are."""
        num = len(self.active)
        gaps = [row for row in range(num) if row not in self.active]
        behind = sorted(row for row in self.active if row >= num)
        for source, target in zip(behind, gaps, strict=True):
            self.engine.copy_row(source, target)
            self.active[target] = self.active.pop(source)
            if self.penalized_RV is not None:
                self.penalized_RV[target] = self.penalized_RV[source]
        return num

    def _fill_rows(self) -> tuple[dict[int, _Prefilled], list[RowTokens]]:
        """Assign rows to what begins now: the prompt of each row, and those prompts that are yet to be computed.

        Samples of a prompt begin one after another. So the row with a prompt that was computed for earlier samples is
        active, or it is free and is taken first here: its tokens are still there.
        """
        free = [row for row in range(self.engine.rows) if row not in self.active]
        if self.latest and self.latest.row in free:
            free = [self.latest.row, *(row for row in free if row != self.latest.row)]
        begun: dict[int, _Prefilled] = {}
        to_prefill: list[RowTokens] = []
        for row in free:
            item = self.queue.first()
            if item is None:
                break
            if item.sample == 0 or not self._has_prompt(item.prompt.tokens, to_prefill):
                one = self._in_same_pass(to_prefill, row, item.prompt.tokens)
                if one is None:
                    break
                to_prefill.append(one)
                self.latest = _Prefilled(row)
            assert self.latest is not None  # of this prompt
            self.queue.pop()
            limit = min(self.settings.max_new_tokens, self.engine.room - len(item.prompt.tokens))
            stream = self._stream(item.prompt) if self.decodes_each_token else None
            self.active[row] = _Sequence(item.prompt, item.sample, limit, stream)
            begun[row] = self.latest
        return begun, to_prefill

    def _has_prompt(self, tokens: list[int], to_prefill: list[RowTokens]) -> bool:
        """Whether the latest prompt's row has it, or can be cut back to it: layers with chunks may have lost it."""
        assert self.latest is not None  # of sample 0
        row = self.latest.row
        return any(one.row == row for one in to_prefill) or self.engine.num_usable(row, tokens) == len(tokens)

    def _in_same_pass(self, others: list[RowTokens], row: int, tokens: list[int]) -> RowTokens | None:
        """A prompt to be computed in one pass with `others`; None if the next pass is better."""
        if others:
            num_shared = min(max(num_common(tokens, other.tokens) for other in others), len(tokens) - 1)
            least = LEAST_SHARED[self.engine.model.device.type]
            if num_shared >= least and num_shared > max(self.engine.num_held(tokens)):
                return None  # after this pass, the shared beginning is in the cache
        one = RowTokens(row, tokens, self.engine.take_beginning(row, tokens))
        return one if not others or self.engine.fit_one_pass([*others, one]) else None

    def _stream(self, prompt: Prompt) -> TextStream:
        return TextStream(self.vocabulary, self.settings.stop_ids, self.settings.stop_strings, after=prompt.tokens)

    def _completion(self, s: _Sequence) -> Completion:
        stream = s.stream
        if stream is None:
            stream = self._stream(s.prompt)
            stream.put(s.tokens)
        rest = stream.finish()
        if self.on_text and rest:
            self.on_text(rest)
        logprobs = s.logprobs if self.settings.logprobs is not None else None
        return Completion(s.prompt, s.sample, s.tokens, stream.text, s.finish_reason, logprobs)

    def _penalize(self, row: int, prompt: Prompt, *, vocab_size: int) -> None:
        if self.penalized_RV is None:
            self.penalized_RV = torch.zeros(
                self.engine.rows, vocab_size, dtype=torch.bool, device=self.engine.model.device
            )
        self.penalized_RV[row] = False
        self.penalized_RV[row, prompt.tokens] = True

    def _all_continue(self) -> bool:
        """Whether no active sequence can end with its next token, but a single one by a stop token or string.

        Of several, one ends all the time, and a step that was computed ahead for all of them would be lost.
        """
        settings, sequences = self.settings, self.active.values()
        may_stop = len(sequences) > 1 and (settings.stop_ids or settings.stop_strings)
        return not may_stop and all(len(s.tokens) + 1 < s.limit for s in sequences)

    def _noise_keys(self, rows: list[int]) -> list[NoiseKey]:
        sequences = [self.active[row] for row in rows]
        return [NoiseKey(s.prompt.id, s.sample, len(s.prompt.tokens) + len(s.tokens)) for s in sequences]

    def _choose(self, rows: list[int], logits_BV: Tensor) -> None:
        """Choose and append the next token of the sequence in each of `rows`."""
        settings, sequences = self.settings, [self.active[row] for row in rows]
        penalized_BV = None if self.penalized_RV is None else self.penalized_RV[rows]
        tokens = choose(logits_BV, settings.sampling, self._noise_keys(rows), penalized_BV=penalized_BV)
        if self.penalized_RV is not None:
            self.penalized_RV[rows, tokens] = True
        if settings.logprobs is not None:
            for s, logprobs in zip(sequences, token_logprobs(logits_BV, tokens, settings.logprobs), strict=True):
                s.logprobs.append(logprobs)
        self._extend(rows, tokens)

    def _extend(self, rows: list[int], tokens: list[int]) -> None:
        """Append the next token of the sequence in each of `rows`; mark those that finish with it."""
        settings = self.settings
        for s, token in zip([self.active[row] for row in rows], tokens, strict=True):
            s.tokens.append(token)
            text = s.stream.add(token) if s.stream else ""
            if self.on_text and text:
                self.on_text(text)
            if token in settings.stop_ids or (s.stream and s.stream.stopped):
                s.finish_reason = "stop"
            elif len(s.tokens) == s.limit:
                s.finish_reason = "length"


@dataclass(frozen=True, slots=True)
class _QueuedSample:
    """One sample of a prompt; about `num_new` of the prompt's tokens must be computed before its first token."""

    prompt: Prompt
    sample: int
    num_new: int


class _PromptQueue:
    """The samples of prompts in order; takes no more prompts from the iterable than rows are free."""

    def __init__(self, prompts: Iterable[Prompt], samples: int, engine: Engine):
        self._engine = engine
        self._coming = self._all_samples(prompts, samples)
        self._ahead: deque[_QueuedSample] = deque()
        self._num_missed = 0  # tokens that free rows could have made while something waited

    def first(self) -> _QueuedSample | None:
        return next(iter(self._peek(1)), None)

    def pop(self) -> _QueuedSample:
        return self._ahead.popleft()

    def should_begin(self, num_free: int) -> bool:
        """Whether waiting samples should begin in the free rows now.

        A pass over few tokens takes about as long as a decode step of all rows. So a single short prompt waits for
        others until its row has missed as many tokens as such a step makes: the wait costs no more than it may save.
        """
        ahead = self._peek(num_free)
        if not ahead:
            return False
        return (
            ahead[0].num_new == 0
            or num_free == self._engine.rows
            or self._num_missed >= self._engine.rows
            or sum(one.num_new for one in ahead) >= _FULL_PASS_TOKENS[self._engine.model.device.type]
        )

    def has_begun(self) -> None:
        """One has begun: the others follow without waiting, as many as there are rows."""
        self._num_missed = self._engine.rows

    def has_stepped(self, num_free: int) -> None:
        """All rows but `num_free` have got one more token."""
        self._num_missed = self._num_missed + num_free if self._peek(num_free) else 0

    def _peek(self, num: int) -> list[_QueuedSample]:
        while len(self._ahead) < num and (one := next(self._coming, None)):
            self._ahead.append(one)
        return [one for _, one in zip(range(num), self._ahead, strict=False)]

    def _all_samples(self, prompts: Iterable[Prompt], samples: int) -> Iterator[_QueuedSample]:
        for prompt in prompts:
            num_new = len(prompt.tokens) - max(self._engine.num_held(prompt.tokens))
            for sample in range(samples):
                yield _QueuedSample(prompt, sample, 0 if sample else num_new)
