"""How likely the model finds one text: its tokens, the log-likelihood of those that are scored, and its result.

A text stands behind the begin-of-text token; where the tokenizer puts none before a text, its first token has no
score. One longer than the model's context goes through in windows, see decoding/likelihood.py.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch.nn.functional as F
from torch import tensor

from converters.errors import CheckpointError, ConfigError
from titan_tools.infer.decoding.likelihood import Likelihood
from titan_tools.infer.decoding.logprobs import TokenLogprobs, token_logprobs
from titan_tools.infer.task import Work


@dataclass(frozen=True, slots=True)
class Text:
    """What is to be scored: `tokens` from `first` on, which stand for `num_bytes` of text."""

    id: str | int
    prompt: str
    completion: str | None  # None: the prompt itself is scored
    tokens: array  # 4 bytes each; in a list they would take 36
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

    def figures(self) -> dict[str, Any]:
        """As results have it. Perplexity is of a token, and None where a double cannot hold it."""
        nats, bits = -self.logprob / self.num_tokens, -self.logprob / math.log(2)
        return {
            "logprob": self.logprob,
            "num_tokens": self.num_tokens,
            "perplexity": math.exp(nats) if nats < 709 else None,
            "bits_per_byte": bits / self.num_bytes if self.num_bytes else None,
        }


@dataclass(frozen=True, slots=True)
class Score:
    """Of one text; `logprobs` where they were asked for."""

    text: Text
    sum: Sum
    logprobs: list[TokenLogprobs] | None


def text_of(work: Work, *, id: str | int, prompt: str, completion: str | None = None) -> Text:
    """A text as the model shall see it. Raises ConfigError where no token of it can have a score.

    Prompt and completion become tokens as one text, of which as many as the prompt alone has are not scored; white
    space at the end of the prompt counts to the completion, because tokens begin with it. Both as in EleutherAI's
    lm-evaluation-harness.
    """
    tokenizer, prefix = work.vocabulary.tokenizer, work.vocabulary.prefix

    def encode(text: str) -> list[int]:
        return work.vocabulary.after_prefix(tokenizer.encode(text, special=work.request.special_tokens))

    tokens = encode(prompt + (completion or ""))
    if completion is None:
        first, scored = len(prefix) or 1, prompt
        if not prefix:  # the first token only leads on
            scored = prompt.removeprefix(tokenizer.decode(tokens[:1]))
    else:
        context = prompt.rstrip()
        first, scored = len(encode(context)), prompt[len(context) :] + completion
    if not 1 <= first < len(tokens):
        what = "it has no text to score" if prefix or not tokens else "one token is too short"
        raise ConfigError(
            f"{what}: a score is of a token behind another one",
            hint="" if prefix else "this tokenizer puts no begin-of-text token before a text",
        )
    return Text(id, prompt, completion, array("i", tokens), first, len(scored.encode()))


def scores(
    likelihood: Likelihood,
    texts: Iterable[Text],
    *,
    num_top: int | None = None,
    advance: Callable[[int], None] = lambda num: None,
) -> Iterator[Score]:
    """How likely the tokens of each text are; with `num_top` also each of them, and that many likelier ones.

    `advance` hears of tokens as they are scored. Raises CheckpointError where logits are not finite.
    """
    so_far, told = Sum(), []
    for pieces, logits_PV in likelihood.logits(texts):
        targets = [token for piece in pieces for token in piece.targets]
        if num_top is None:
            logprobs = (
                -F.cross_entropy(logits_PV, tensor(targets, device=logits_PV.device), reduction="none")
            ).tolist()
        else:
            found = token_logprobs(logits_PV, targets, num_top)
            logprobs = [one.logprob for one in found]
        start = 0
        for piece in pieces:
            text, num = piece.text, len(piece.targets)
            so_far += Sum(math.fsum(logprobs[start : start + num]), num)
            if not math.isfinite(so_far.logprob):
                raise CheckpointError(
                    f"the logits of the text with id {text.id!r} are not finite",
                    hint="the weights hold NaN or infinity, or overflow in this dtype",
                    tries=["--dtype float32"],
                )
            if num_top is not None:
                told += found[start : start + num]
            start += num
            advance(num)
            if so_far.num_tokens == len(text.tokens) - text.first:
                yield Score(text, so_far + Sum(num_bytes=text.num_bytes), None if num_top is None else told)
                so_far, told = Sum(), []


def result_of_score(score: Score) -> dict[str, Any]:
    """One element of `results`, the same in a JSON object and in a line of a batch."""
    text, of_completion = score.text, score.text.completion is not None
    tokens = text.tokens.tolist()
    return {
        "id": text.id,
        "prompt": text.prompt,
        **({"completion": text.completion} if of_completion else {}),
        "prompt_tokens": tokens[: text.first] if of_completion else tokens,
        **({"tokens": tokens[text.first :]} if of_completion else {}),
        **score.sum.figures(),
        "logprobs": None if score.logprobs is None else [asdict(told) for told in score.logprobs],
    }
