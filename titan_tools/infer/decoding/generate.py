"""Continue prompts: they are put into free rows of the engine, all rows decode together, an ended one makes room."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from titan_tools.infer.decoding.common_beginning import LEAST_SHARED, num_common
from titan_tools.infer.decoding.engine import Engine, RowTokens
from titan_tools.infer.decoding.logprobs import TokenLogprobs, token_logprobs
from titan_tools.infer.decoding.sampling import Sampling, Seat, choose
from titan_tools.infer.decoding.waiting import Waiting
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

    first_token_secs: list[float] = field(default_factory=list)  # of each prompt: from its pass' beginning
    prepare_secs: float = 0.0  # compiling and recording decode steps, once for each shape
    decode_secs: float = 0.0
    num_decode_steps: int = 0
    num_tokens: int = 0  # all new ones
    cache_tokens_read: int = 0  # keys that decode steps looked at, summed over steps and rows


@dataclass(slots=True)
class _Read:
    """A prompt that is read once for all of its samples: the row that holds it, and the logits of its last token."""

    row: int
    logits_V: Tensor | None = None


@dataclass(slots=True)
class _Sequence:
    prompt: Prompt
    sample: int
    limit: int
    stream: TextStream | None  # None: its text is made at its end
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
) -> Iterator[Completion]:
    """Completions in the order in which they end. `on_text` hears of text as soon as it is sure; one row only.

    What the engine's rows hold of a prompt's beginning is not computed again.
    """
    run = _Run(engine, prompts, settings, vocabulary, timings or Timings(), on_text)
    while True:
        while run.may_begin():
            run.begin()
            yield from run.take_ended()
        if not run.close_gaps():
            return
        run.step()
        yield from run.take_ended()


class _Run:
    """The sequences at work, each in the engine's row of its place, and what they share."""

    def __init__(
        self,
        engine: Engine,
        prompts: Iterable[Prompt],
        settings: Settings,
        vocabulary: Vocabulary,
        timings: Timings,
        on_text: Callable[[str], None] | None,
    ):
        self.engine, self.settings, self.vocabulary = engine, settings, vocabulary
        self.timings, self.on_text = timings, on_text
        self.asks_for_text = bool(on_text or settings.stop_strings)  # of each token; else of a sequence's all at once
        self.waiting = Waiting(prompts, settings.samples, engine)
        self.rows: list[_Sequence | None] = [None] * engine.rows
        self.latest: _Read | None = None
        self.penalized_RV: Tensor | None = None  # tokens of each row, which a repetition penalty is for

    def may_begin(self) -> bool:
        """Whether something waits that is to begin now."""
        return self.waiting.pays(self.rows.count(None))

    def begin(self) -> None:
        """Put what waits into free rows, as many prompts as one pass takes, and choose first tokens."""
        started = perf_counter()
        begun, unread = self._take()
        if unread:
            for one, logits_V in zip(unread, self.engine.prefill_rows(unread), strict=True):
                begun[one.row].logits_V = logits_V
        for row, read in begun.items():
            prompt = self.rows[row].prompt
            self.engine.copy_row(read.row, row, length=len(prompt.tokens))
            if self.settings.sampling.repetition_penalty != 1:
                self._penalize(row, prompt, vocab_size=len(read.logits_V))
        self._extend(list(begun), torch.stack([read.logits_V for read in begun.values()]))
        self.waiting.has_begun()
        self.timings.num_tokens += len(begun)
        self.timings.first_token_secs += [perf_counter() - started] * len(unread)

    def step(self) -> None:
        """One more token for each of the sequences at work, which have the first rows."""
        timings, active = self.timings, [s for s in self.rows if s]
        started = perf_counter()
        self.engine.prepare_decode(len(active))
        prepared = perf_counter()
        logits_BV = self.engine.decode([s.tokens[-1] for s in active])
        self._extend(list(range(len(active))), logits_BV)
        self.waiting.has_stepped(self.rows.count(None))
        timings.prepare_secs += prepared - started
        timings.decode_secs += perf_counter() - prepared
        timings.num_decode_steps += 1
        timings.num_tokens += len(active)
        timings.cache_tokens_read += sum(self.engine.lengths(len(active)))

    def take_ended(self) -> Iterator[Completion]:
        """What came of the sequences that have ended, whose rows are free now."""
        for row, sequence in enumerate(self.rows):
            if sequence and sequence.finish_reason:
                self.rows[row] = None
                yield self._completion(sequence)

    def close_gaps(self) -> int:
        """Let the sequences at work, which are that many, have the first rows."""
        at_work = [row for row, sequence in enumerate(self.rows) if sequence]
        gaps = [row for row in range(len(at_work)) if self.rows[row] is None]
        behind = [row for row in at_work if row >= len(at_work)]
        for source, target in zip(behind, gaps, strict=True):
            self.engine.copy_row(source, target)
            self.rows[source], self.rows[target] = None, self.rows[source]
            if self.penalized_RV is not None:
                self.penalized_RV[target] = self.penalized_RV[source]
        return len(at_work)

    def _take(self) -> tuple[dict[int, _Read], list[RowTokens]]:
        """Give rows to what begins now: the prompt of each, and those prompts that are yet to be read.

        Nothing else begins between samples of a prompt. So the row with a prompt that was read for earlier ones is at
        work, or it is free and comes first here: it is whole.
        """
        free = [row for row, sequence in enumerate(self.rows) if sequence is None]
        if self.latest and self.latest.row in free:
            free = [self.latest.row, *(row for row in free if row != self.latest.row)]
        begun, unread = {}, []
        for row in free:
            item = self.waiting.first()
            if item is None:
                break
            if item.sample == 0:
                one = self._beside(unread, row, item.prompt.tokens)
                if one is None:
                    break
                unread.append(one)
                self.latest = _Read(row)
            self.waiting.pop()
            limit = min(self.settings.max_new_tokens, self.engine.room - len(item.prompt.tokens))
            stream = self._stream(item.prompt) if self.asks_for_text else None
            self.rows[row] = _Sequence(item.prompt, item.sample, limit, stream)
            begun[row] = self.latest
        return begun, unread

    def _beside(self, unread: list[RowTokens], row: int, tokens: list[int]) -> RowTokens | None:
        """A prompt to be read in one pass with those in `unread`; None where it is better off in the next one."""
        if unread:
            num_shared = min(max(num_common(tokens, other.tokens) for other in unread), len(tokens) - 1)
            least = LEAST_SHARED[self.engine.model.device.type]
            if num_shared >= least and num_shared > max(self.engine.num_held(tokens)):
                return None  # behind this pass, which computes what they share
        one = RowTokens(row, tokens, self.engine.take_beginning(row, tokens))
        return one if not unread or self.engine.fit_one_pass([*unread, one]) else None

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
                len(self.rows), vocab_size, dtype=torch.bool, device=self.engine.model.device
            )
        self.penalized_RV[row] = False
        self.penalized_RV[row, prompt.tokens] = True

    def _extend(self, rows: list[int], logits_BV: Tensor) -> None:
        """Choose and append the next token of the sequence in each of `rows`, and say which of them end with it."""
        settings, sequences = self.settings, [self.rows[row] for row in rows]
        seats = [Seat(s.prompt.id, s.sample, len(s.prompt.tokens) + len(s.tokens)) for s in sequences]
        penalized_BV = None if self.penalized_RV is None else self.penalized_RV[rows]
        tokens = choose(logits_BV, settings.sampling, seats, penalized_BV=penalized_BV)
        if self.penalized_RV is not None:
            self.penalized_RV[rows, tokens] = True
        if settings.logprobs is not None:
            for s, told in zip(sequences, token_logprobs(logits_BV, tokens, settings.logprobs), strict=True):
                s.logprobs.append(told)
        for s, token in zip(sequences, tokens, strict=True):
            s.tokens.append(token)
            text = s.stream.add(token) if s.stream else ""
            if self.on_text and text:
                self.on_text(text)
            if token in settings.stop_ids or (s.stream and s.stream.stopped):
                s.finish_reason = "stop"
            elif len(s.tokens) == s.limit:
                s.finish_reason = "length"
