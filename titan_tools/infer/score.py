"""How likely a model finds texts: log-likelihood, perplexity and bits per byte of one text, or of each line of a batch.

A text stands behind the begin-of-text token, as in training; where the tokenizer has none, its first token has no
score. One longer than the model's context goes through in windows, see likelihood.py.
"""

import math
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch.nn.functional as F
from torch import tensor

from converters.errors import ConfigError
from titan_tools.console import note, print_json, table
from titan_tools.infer.engine import Engine
from titan_tools.infer.generate import Timings
from titan_tools.infer.likelihood import Likelihood
from titan_tools.infer.logprobs import TokenLogprobs, token_logprobs
from titan_tools.infer.ranks import Ranks
from titan_tools.infer.report import describe, stats_of
from titan_tools.infer.task import Work


@dataclass(frozen=True, slots=True)
class Text:
    """What is to be scored: `tokens` from `first` on, which stand for `num_bytes` of text."""

    id: str | int
    prompt: str
    completion: str | None  # None: the prompt itself is scored
    tokens: list[int]
    first: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Sum:
    """Natural logarithms of probabilities, summed up in float64."""

    logprob: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.logprob + other.logprob, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)

    def told(self) -> dict[str, Any]:
        """What is printed of it. Perplexity, of a token, is infinite where a double cannot hold it."""
        nats = -self.logprob / self.num_tokens
        return {
            "logprob": self.logprob,
            "num_tokens": self.num_tokens,
            "perplexity": math.exp(nats) if nats < 709 else math.inf,
            "bits_per_byte": -self.logprob / math.log(2) / self.num_bytes if self.num_bytes else math.inf,
        }


def text_of(work: Work, *, id: str | int, prompt: str, completion: str | None = None) -> Text:
    """A text as the model shall see it. Raises ConfigError where no token of it can have a score.

    Prompt and completion become tokens as one text, of which the prompt's number of tokens is not scored; white space
    at the end of the prompt counts to the completion, because tokens begin with it (both as in lm-evaluation-harness).
    """
    tokenizer = work.vocabulary.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=True, special=work.request.special_tokens)

    tokens = encode(prompt + (completion or ""))
    if completion is None:
        first, scored = 1, prompt
        if tokenizer.bos_id is None:  # the first token only leads on
            scored = prompt.removeprefix(tokenizer.decode(tokens[:1]))
    else:
        context = prompt.rstrip()
        first, scored = len(encode(context)), prompt[len(context) :] + completion
    if not 1 <= first < len(tokens):
        raise ConfigError(
            f"nothing of the text with id {id!r} can be scored: a score needs a token before it",
            hint="the tokenizer has no begin-of-text token" if tokenizer.bos_id is None else "it has no tokens",
        )
    return Text(id, prompt, completion, tokens, first, len(scored.encode()))


@dataclass(frozen=True, slots=True)
class Score:
    """Of one text; `logprobs` where they were asked for."""

    text: Text
    sum: Sum
    logprobs: list[TokenLogprobs] | None


def score(likelihood: Likelihood, text: Text, *, num_top: int | None = None) -> Score:
    """How likely the tokens of `text` are; with `num_top` also each of them, and that many likelier ones."""
    logprob, told = 0.0, None if num_top is None else []
    for targets, logits_PV in likelihood.logits(text.tokens, first=text.first):
        if told is None:
            nats_P = F.cross_entropy(logits_PV, tensor(targets, device=logits_PV.device), reduction="none")
            logprob -= nats_P.double().sum().item()
        else:
            told += token_logprobs(logits_PV, targets, num_top)
    if told is not None:
        logprob = math.fsum(one.logprob for one in told)
    return Score(text, Sum(logprob, len(text.tokens) - text.first, text.num_bytes), told)


def result_of_score(score: Score) -> dict[str, Any]:
    """One element of `results`, the same in a JSON object and in a line of a batch."""
    text, of_completion = score.text, score.text.completion is not None
    return {
        "id": text.id,
        "prompt": text.prompt,
        **({"completion": text.completion} if of_completion else {}),
        "prompt_tokens": text.tokens[: text.first] if of_completion else text.tokens,
        **({"tokens": text.tokens[text.first :]} if of_completion else {}),
        **score.sum.told(),
        "logprobs": None if score.logprobs is None else [asdict(told) for told in score.logprobs],
    }


@dataclass(frozen=True, slots=True)
class Scoring:
    """A task; see task.py."""

    work: Work
    texts: list[Text]
    context: int
    rows: int
    room: int

    def run(self, engine: Engine, ranks: Ranks) -> None:
        request = self.work.request
        likelihood = Likelihood(engine, context=self.context, vocab_size=self.work.args.vocab_size)
        started = perf_counter()
        scores = [score(likelihood, text, num_top=request.logprobs) for text in self.texts]
        total = sum((one.sum for one in scores), Sum())
        timings = Timings(num_tokens=total.num_tokens)
        stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started) | total.told()
        if not ranks.is_first:
            return
        if request.as_json:
            print_json({"results": [result_of_score(one) for one in scores], "stats": stats})
        else:
            print_totals(total)
            note(describe(stats))


def print_totals(total: Sum) -> None:
    """The table that people get instead of JSON."""
    told = total.told()
    row = [told["num_tokens"], f"{told['logprob']:.4f}", f"{told['perplexity']:.6g}", f"{told['bits_per_byte']:.4f}"]
    table(["tokens", "log-likelihood", "perplexity", "bits per byte"], [row])


def prepare_score(work: Work) -> Scoring:
    """The texts to score. One may be longer than the context, of which `--context` may name a smaller one."""
    request = work.request
    context = min(request.context or work.args.max_seq_len, work.args.max_seq_len)
    texts = [text_of(work, id="0", prompt=request.text)]
    room = min(context, max(len(text.tokens) for text in texts) - 1)
    return Scoring(work, texts, context, rows=1, room=room)
