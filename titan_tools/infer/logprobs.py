"""How likely the model found a token, and what it found likelier: its own distribution, before any sampling filter."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms. `top` are the likeliest tokens with theirs, the likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits_BV: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of the token chosen from each row of logits."""
    logprobs_BV = logits_BV.float().log_softmax(-1)
    tops, ids = logprobs_BV.topk(num_top) if num_top else (logprobs_BV[:, :0], logprobs_BV[:, :0].long())
    own = [float(row[token]) for row, token in zip(logprobs_BV, tokens, strict=True)]
    return [
        TokenLogprobs(token, logprob, list(zip(row_ids, row_tops, strict=True)))
        for token, logprob, row_ids, row_tops in zip(tokens, own, ids.tolist(), tops.tolist(), strict=True)
    ]
