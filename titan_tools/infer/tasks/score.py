"""How likely a model finds texts: a table of one text or file, or a result for each line of a batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from converters.errors import ConfigError
from titan_tools.console import count, note, table
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Timings
from titan_tools.infer.decoding.likelihood import Likelihood
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.report import describe, stats_of
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.batch_lines import Line, read_lines
from titan_tools.infer.tasks.made_with import made_with
from titan_tools.infer.tasks.progress_bar import progress_bar
from titan_tools.infer.tasks.results_file import all_there, is_complete
from titan_tools.infer.tasks.results_lines import Expected, Key
from titan_tools.infer.tasks.score_text import Sum, Text, result_of_score, scores, text_of
from titan_tools.infer.tasks.sinks import Sink, open_sink, opened_by_first


@dataclass(frozen=True, slots=True)
class Scoring:
    """A task; see task.py."""

    work: Work
    texts: list[Text]
    context: int
    rows: int
    room: int

    def run(self, engine: Engine | None, ranks: Ranks) -> None:
        request = self.work.request
        likelihood = Likelihood(engine, context=self.context, vocab_size=self.work.args.vocab_size)
        before = _Before(self.texts)
        with opened_by_first(ranks, self._open_sink(before), before.missing) as (sink, missing):
            if ranks.is_first and not missing:
                note(all_there(request.out))
            elif ranks.is_first and before.sums:
                note(f"{len(before.sums):,} of {count(len(self.texts), 'text')} are in {request.out} already: skipped")
            now, started = Sum(), perf_counter()
            num_tokens = sum(len(self.texts[i].tokens) - self.texts[i].first for i in missing)
            with progress_bar(request, ranks, num_tokens, "scoring tokens") as advance:
                texts = (self.texts[i] for i in missing)
                for one in scores(likelihood, texts, num_top=request.logprobs, advance=advance):
                    now += one.sum
                    if sink is not None:
                        sink.append((one.text.id, 0), result_of_score(one))
            timings = Timings(num_tokens=now.num_tokens)
            stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
            if not ranks.is_first:  # which alone knows what was there before
                return
            total = sum(before.sums.values(), now).figures()
            if sink is not None:
                sink.finish(stats | total)
        self._tell(total)
        if missing and not request.as_json:
            note(describe(stats))

    def _open_sink(self, before: "_Before") -> AbstractContextManager[Sink | None]:
        request = self.work.request
        if request.batch is None and not request.as_json:
            return nullcontext()
        return open_sink(request, _expected(self.work, self.texts, before))

    def _tell(self, total: dict[str, Any]) -> None:
        """The sum of all texts, on stdout where no results went there; an object holds it in its stats."""
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


class _Before:
    """What the results file holds of an earlier run."""

    def __init__(self, texts: Sequence[Text]):
        self._texts = {text.id: text for text in texts}
        self.sums: dict[Key, Sum] = {}

    def missing(self, sink: Sink | None) -> list[int]:
        """The places of the texts that have no score yet, once the results file was read."""
        return [i for i, id in enumerate(self._texts) if (id, 0) not in self.sums]

    def differs(self, key: Key, result: dict[str, Any]) -> str:
        """What makes a result another's than this run's; "" for nothing, and its sum is taken up."""
        text, logprob = self._texts[key[0]], result.get("logprob")
        parts = [result.get(name, []) for name in ("prompt_tokens", "tokens")]
        if not isinstance(logprob, float) or not all(isinstance(tokens, list) for tokens in parts):
            return "no score"
        if (result.get("prompt"), result.get("completion")) != (text.prompt, text.completion):
            return "another text"
        if parts[0] + parts[1] != text.tokens.tolist():
            return "other tokens of the same text"
        self.sums[key] = Sum(logprob, len(text.tokens) - text.first, text.num_bytes)
        return ""


def _expected(work: Work, texts: Sequence[Text], before: _Before) -> Expected:
    keys = [(text.id, 0) for text in texts]
    return Expected(keys, before.differs, made_with(work) if work.request.out else None)


def prepare_score(work: Work) -> Scoring:
    """The texts to score, of any length, and a file that can take their results; nothing is written.

    Raises ConfigError, or DataError with all lines of a batch that are wrong.
    """
    request, longest = work.request, work.args.max_seq_len
    context = request.context or longest
    if context > longest:
        raise ConfigError(f"--context is {context:,}, but the model's is {longest:,} tokens")
    if request.batch is None:
        texts = [text_of(work, id="0", prompt=request.text)]
    else:
        texts = _read_texts(work)
    is_done = is_complete(request.out, _expected(work, texts, _Before(texts)))
    room = min(context, max(len(text.tokens) for text in texts) - 1)
    return Scoring(work, texts, context, rows=0 if is_done else 1, room=room)


def _read_texts(work: Work) -> list[Text]:
    def take(line: Line) -> Text:
        completion = line.text("completion") if "completion" in line.values else None
        return text_of(work, id=line.id, prompt=line.text("prompt"), completion=completion)

    return read_lines(work, take, keys=("prompt", "completion"))
