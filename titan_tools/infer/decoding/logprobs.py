"""How likely the model found a token, and what it found likelier: its own distribution, before any sampling filter.

Shapes: B rows of a batch, V tokens of the vocabulary, K tokens told beside the chosen one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms. `top` are the likeliest tokens with theirs, likeliest first, of equal ones the lower id."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def check_logprobs(num_top: int | None, *, vocab_size: int) -> None:
    """Raise ConfigError for more tokens than there are. 0 tells of the chosen token alone, None of nothing."""
    if num_top is not None and not 0 <= num_top <= vocab_size:
        raise ConfigError(f"--logprobs is {num_top}; it must be from 0 to the vocabulary's {vocab_size} tokens")


def token_logprobs(logits_BV: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of the token chosen from each row of finite logits, and of the `num_top` likeliest ones."""
    logits_BV = logits_BV.float()
    ids_BK = torch.tensor(tokens).view(-1, 1).to(logits_BV.device, non_blocking=True)
    if num_top:  # of a few rows at a time: their order takes several times their memory
        top_BK = torch.cat([_likeliest(rows_BV, num_top) for rows_BV in logits_BV.split(8)])
        ids_BK = torch.cat([ids_BK, top_BK], dim=-1)
    logprobs_BK = logits_BV.log_softmax(-1).gather(-1, ids_BK)
    # one look at the device; float64 holds ids and float32 as they are
    top_ids, logprobs = torch.stack([ids_BK.double(), logprobs_BK.double()]).tolist()
    return [
        TokenLogprobs(int(token), own, [(int(id), logprob) for id, logprob in zip(row_ids, row, strict=True)])
        for (token, *row_ids), (own, *row) in zip(top_ids, logprobs, strict=True)
    ]


def _likeliest(logits_BV: Tensor, num_top: int) -> Tensor:
    """Ids of the largest logits. Equal ones, of which bfloat16 has many, come in greedy's order."""
    # One number for logit and id: a float32's bits are in its own order once those of the negative ones are turned.
    bits_BV = (logits_BV + 0.0).view(torch.int32)  # there is no -0 then
    ordered_BV = torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV).long()
    ids_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    return ids_V.shape[0] - 1 - (ordered_BV * 2**31 + ids_V.flip(0)).topk(num_top).values % 2**31
