"""Scoring: log-likelihood and perplexity of one text, or of each line of a batch.

A text follows the begin-of-text token; with a tokenizer that has none, the first token gets no score. Texts longer than
the context are scored in windows, see decoding/likelihood.py.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch.nn.functional as F
from torch import tensor

from converters.common.errors import CheckpointError, ConfigError
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Timings
from titan_tools.infer.decoding.likelihood import Likelihood, ScoredText
from titan_tools.infer.decoding.sampling import TokenLogprobs, token_logprobs
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.report import describe, progress_bar, stats_of
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.batch_lines import BatchLine, read_lines
from titan_tools.infer.tasks.results import ExpectedResults, ResultSink, is_complete, note_on_stored, open_sink
from titan_tools.infer.tasks.results_settings import results_settings
from titan_tools.terminal.console import count, note, table


@dataclass(frozen=True, slots=True)
class LogprobSum:
    """Log-probabilities (natural logarithms) summed in float64."""

    logprob: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0

    def __add__(self, other: "LogprobSum") -> "LogprobSum":
        return LogprobSum(
            self.logprob + other.logprob, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes
        )

    def metrics(self) -> dict[str, Any]:
        """The numbers of a result. Perplexity is per token, and None if it exceeds a double."""
        nats, bits = -self.logprob / self.num_tokens, -self.logprob / math.log(2)
        return {
            "logprob": self.logprob,
            "num_tokens": self.num_tokens,
            "perplexity": math.exp(nats) if nats < 709 else None,
            "bits_per_byte": bits / self.num_bytes if self.num_bytes else None,
        }


@dataclass(frozen=True, slots=True)
class TextScore:
    """The score of one text; `logprobs` of its tokens where they were requested."""

    text: ScoredText
    sum: LogprobSum
    logprobs: list[TokenLogprobs] | None


def tokenize_text(work: Work, *, id: str | int, prompt: str, completion: str | None = None) -> ScoredText:
    """A text as the model reads it. Raises ConfigError if no token of it can have a score.

    Prompt and completion are tokenized as one text, of which as many tokens as the prompt alone has are not scored;
    white space at the end of the prompt counts to the completion, because tokens begin with it. Both as in EleutherAI's
    lm-evaluation-harness.
    """
    tokenizer, prefix = work.vocabulary.tokenizer, work.vocabulary.prefix

    def encode(text: str) -> list[int]:
        return [*prefix, *tokenizer.encode(text, special=work.request.special_tokens)]

    tokens = tokenizer.checked(encode(prompt + (completion or "")))
    if completion is None:
        first, scored = len(prefix) or 1, prompt
        if not prefix:  # the first token is only context
            scored = prompt.removeprefix(tokenizer.decode(tokens[:1]))
    else:
        context = prompt.rstrip()
        first, scored = len(encode(context)), prompt[len(context) :] + completion
    if not 1 <= first < len(tokens):
        what = "it has no text to score" if prefix or not tokens else "one token is too short"
        raise ConfigError(
            f"{what}: only a token that follows another one has a score",
            hint="" if prefix else "this tokenizer puts no begin-of-text token before a text",
        )
    return ScoredText(id, prompt, completion, array("i", tokens), first, len(scored.encode()))


def score_texts(
    likelihood: Likelihood,
    texts: Iterable[ScoredText],
    *,
    num_top: int | None = None,
    advance: Callable[[int], None] = lambda num: None,
) -> Iterator[TextScore]:
    """The score of each text; with `num_top` also of each token, with that many of the likeliest tokens.

    Calls `advance` with numbers of scored tokens. Raises CheckpointError if logits are not finite.
    """
    total = LogprobSum()
    by_token: list[TokenLogprobs] = []
    for pieces, logits_PV in likelihood.logits(texts):
        targets = [token for piece in pieces for token in piece.targets]
        logprobs_of_tokens: list[TokenLogprobs] = []
        if num_top is None:
            targets_P = tensor(targets, device=logits_PV.device)
            logprobs = (-F.cross_entropy(logits_PV, targets_P, reduction="none")).tolist()
        else:
            logprobs_of_tokens = token_logprobs(logits_PV, targets, num_top)
            logprobs = [scored.logprob for scored in logprobs_of_tokens]
        start = 0
        for piece in pieces:
            text, num = piece.text, len(piece.targets)
            total += LogprobSum(math.fsum(logprobs[start : start + num]), num)
            if not math.isfinite(total.logprob):
                raise CheckpointError(
                    f"the logits of the text with id {text.id!r} are not finite",
                    hint="the weights hold NaN or infinity, or overflow in this dtype",
                    tries=["--dtype float32"],
                )
            by_token += logprobs_of_tokens[start : start + num]
            start += num
            advance(num)
            if total.num_tokens == len(text.tokens) - text.first:
                score = total + LogprobSum(num_bytes=text.num_bytes)
                yield TextScore(text, score, None if num_top is None else by_token)
                total, by_token = LogprobSum(), []


def _inputs_of(text: ScoredText) -> dict[str, Any]:
    """What a result has from its line of the batch."""
    tokens = text.tokens.tolist()
    if text.completion is None:
        return {"prompt": text.prompt, "prompt_tokens": tokens}
    parts = {"prompt_tokens": tokens[: text.first], "tokens": tokens[text.first :]}
    return {"prompt": text.prompt, "completion": text.completion, **parts}


def _result_of(score: TextScore) -> dict[str, Any]:
    """One element of `results`, the same in a JSON object and in a line of a batch."""
    logprobs = None if score.logprobs is None else [asdict(one) for one in score.logprobs]
    return {"id": score.text.id, **_inputs_of(score.text), **score.sum.metrics(), "logprobs": logprobs}


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Scores one text or the lines of a batch; see task.py."""

    work: Work
    texts: list[ScoredText]
    expected: ExpectedResults
    context: int
    rows: int
    room: int

    @property
    def least_tokens(self) -> int:
        return min(self.room, min((len(text.tokens) - 1 for text in self.texts), default=0))

    def run(self, engine: Engine | None, ranks: TPRanks) -> None:
        request = self.work.request
        prints_results = request.batch is not None or request.as_json
        opened = open_sink(request, self.expected, ranks) if prints_results else nullcontext((None, [0]))
        with opened as (sink, missing):
            if ranks.is_first:
                note_on_stored(request.out, num_missing=len(missing), num=len(self.texts), what="text")
            stored, new, started = self._stored_sums(sink), LogprobSum(), perf_counter()
            num_tokens = sum(len(self.texts[i].tokens) - self.texts[i].first for i in missing)
            with progress_bar(request, ranks, num_tokens, "scoring tokens") as advance:
                for score in self._scores(engine, missing, advance):
                    new += score.sum
                    if sink is not None:
                        sink.append((score.text.id, 0), _result_of(score))
            timings = Timings(num_tokens=new.num_tokens)
            stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
            if not ranks.is_first:  # only the first rank knows the stored scores
                return
            total = sum(stored, new).metrics()
            if sink is not None:
                sink.finish(stats | total)
        self._print_total(total)
        if missing and not request.as_json:
            note(describe(stats))

    def _stored_sums(self, sink: ResultSink | None) -> list[LogprobSum]:
        """The scores that an earlier run has left in the results file."""
        num_bytes = {text.id: text.num_bytes for text in self.texts}
        found = sink.stored_results() if sink is not None else ()
        return [LogprobSum(one["logprob"], one["num_tokens"], num_bytes[one["id"]]) for one in found]

    def _scores(self, engine: Engine | None, missing: list[int], advance: Callable[[int], None]) -> Iterator[TextScore]:
        if engine is not None:
            likelihood = Likelihood(engine, context=self.context, vocab_size=self.work.args.vocab_size)
            texts = (self.texts[i] for i in missing)
            yield from score_texts(likelihood, texts, num_top=self.work.request.logprobs, advance=advance)

    def _print_total(self, total: dict[str, Any]) -> None:
        """The total of all texts: to stderr where stdout has the results; with --json it is in the stats."""
        request = self.work.request
        if request.as_json:
            return
        perplexity, bits = (
            "too large" if (value := total[name]) is None else f"{value:{form}}"
            for name, form in (("perplexity", ".6g"), ("bits_per_byte", ".4f"))
        )
        if request.batch is not None and request.out is None:
            tokens = count(total["num_tokens"], "token")
            note(f"all: {tokens}, log-likelihood {total['logprob']:.4f}, perplexity {perplexity}, bits per byte {bits}")
        else:
            row = [total["num_tokens"], f"{total['logprob']:.4f}", perplexity, bits]
            table(["tokens", "log-likelihood", "perplexity", "bits per byte"], [row])


def prepare_score(work: Work) -> ScoreTask:
    """The texts to score, of any length; no result is written.

    Raises DataError with all invalid lines of a batch, and ConfigError.
    """
    request, longest = work.request, work.args.max_seq_len
    context = request.context or longest
    if context > longest:
        raise ConfigError(f"--context is {context:,}, but the model's is {longest:,} tokens")
    if request.text is not None:
        texts = [tokenize_text(work, id="0", prompt=request.text)]
    else:
        texts = read_lines(work, lambda line: _text_of(work, line), keys=("prompt", "completion"))
    settings = results_settings(work) if request.out else None
    expected = ExpectedResults([text.id for text in texts], lambda i: _inputs_of(texts[i]), settings=settings)
    rows = 0 if is_complete(request.out, expected) else 1
    room = min(context, max(len(text.tokens) for text in texts) - 1)
    return ScoreTask(work, texts, expected, context, rows, room)


def _text_of(work: Work, line: BatchLine) -> ScoredText:
    completion = line.text("completion") if "completion" in line.values else None
    return tokenize_text(work, id=line.id, prompt=line.text("prompt"), completion=completion)
