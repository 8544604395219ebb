"""Choose the next token, greedily or by sampling, and report log-probabilities.

The random number of a token does not depend on the batch, rank or device. Shapes: B rows of a batch, V tokens of the
vocabulary, K likeliest tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import torch
from torch import Tensor

from converters.common.errors import CheckpointError, ConfigError

_FEW = 1024  # likeliest tokens, which mostly hold top-p's share


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy.

    In this order: repetition penalty, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which token of which sequence is chosen; its random number depends on this and the seed only."""

    prompt_id: str | int
    sample: int
    position: int  # counted from the prompt's start


def check_sampling(sampling: Sampling, *, vocab_size: int | None = None) -> None:
    """Raise ConfigError with every invalid value; `vocab_size` bounds top-k once the checkpoint is known."""
    problems, tries = list(_problems(sampling, vocab_size)), []
    if sampling.temperature == 0 and not problems:
        # Greedy decoding would silently ignore them
        filters = {"--top-k": sampling.top_k, "--top-p": sampling.top_p, "--min-p": sampling.min_p}
        problems = [f"{name} has no effect at temperature 0" for name, value in filters.items() if value is not None]
        tries = ["--temperature 1"]
    if problems:
        raise ConfigError("; ".join(problems), tries=tries)


def _problems(sampling: Sampling, vocab_size: int | None) -> Iterator[str]:
    temperature, top_k, penalty = sampling.temperature, sampling.top_k, sampling.repetition_penalty
    if not isfinite(temperature) or temperature < 0:
        yield f"--temperature is {temperature}; it must be a number ≥ 0 (0 is greedy)"
    if top_k is not None and top_k < 1:
        yield f"--top-k is {top_k}; it must be at least 1"
    if top_k is not None and vocab_size is not None and top_k > vocab_size:
        yield f"--top-k is {top_k}, but the vocabulary has {vocab_size} tokens"
    for name, share in (("--top-p", sampling.top_p), ("--min-p", sampling.min_p)):
        if share is not None and not 0 < share <= 1:  # also catches NaN
            yield f"{name} is {share}; it must be above 0 and at most 1"
    if not 1e-6 <= penalty <= 1e6:  # beyond, penalized logits would leave float32
        yield f"--repetition-penalty is {penalty}; it must be between 1e-06 and 1e+06 (1 is none)"


def choose(
    logits_BV: Tensor, sampling: Sampling, keys: Sequence[NoiseKey], *, penalized_BV: Tensor | None = None
) -> list[int]:
    """The next token of each sequence; `penalized_BV` marks the tokens that a repetition penalty applies to.

    A row's token is the same alone and in any batch. The host synchronizes with the device once. Raises CheckpointError
    if logits are not finite.
    """
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if penalized_BV is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        reduced_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
        logits_BV = torch.where(penalized_BV, reduced_BV, logits_BV)
    if sampling.temperature == 0:
        return require_finite(likeliest(logits_BV).tolist(), keys)
    noise_B1 = torch.tensor([[uniform(sampling.seed, key)] for key in keys], dtype=torch.float64)
    noise_B1 = noise_B1.to(logits_BV.device, non_blocking=True)
    tokens_B = _draw(token_weights(logits_BV, sampling, num_sorted=_FEW), noise_B1)
    tokens = require_finite(torch.stack([_is_finite(logits_BV), tokens_B]).tolist(), keys)
    if logits_BV.shape[-1] in tokens:  # the likeliest tokens hold less than top-p
        tokens = _draw(token_weights(logits_BV, sampling), noise_B1).tolist()
    return tokens


def likeliest(logits_BV: Tensor) -> Tensor:
    """For each row of fp32 logits whether all are finite, and the likeliest token, of equal ones the first: [2, B]."""
    return torch.stack([_is_finite(logits_BV), logits_BV.argmax(-1)])


def _is_finite(logits_BV: Tensor) -> Tensor:
    lowest_B, highest_B = logits_BV.aminmax(dim=-1)
    return ((lowest_B > -torch.inf) & (highest_B < torch.inf)).long()  # 0 for NaN too


def require_finite(found: list[list[int]], keys: Sequence[NoiseKey]) -> list[int]:
    """The tokens of `likeliest`. Raises CheckpointError if logits are not finite."""
    finite, tokens = found
    for key, is_finite in zip(keys, finite, strict=True):
        if not is_finite:
            raise CheckpointError(
                f"the logits at position {key.position} of prompt {key.prompt_id!r} are not finite",
                hint="the weights hold NaN or infinity, or overflow in this dtype",
                tries=["--dtype float32"],
            )
    return tokens


def _draw(weights_BV: Tensor, noise_B1: Tensor) -> Tensor:
    """One token of each row; the size of the vocabulary where all weights are 0.

    The first token whose cumulative sum exceeds the random number: near-equal weights cannot change the order, and a
    token of weight 0 is never chosen.
    """
    cumulative_BV = weights_BV.cumsum(-1)
    # noise is at most 1 - 2**-52, so that the product stays below the sum with any rounding
    marks_B1 = (noise_B1 * cumulative_BV[:, -1:].double()).long()
    return torch.searchsorted(cumulative_BV, marks_B1, right=True)[:, 0]


def token_weights(logits_BV: Tensor, sampling: Sampling, *, num_sorted: int | None = None) -> Tensor:
    """Unnormalized probabilities [B, V] as integers, 0 for tokens that are filtered out.

    `num_sorted`: how many of the likeliest tokens top-p considers (None: all). A row that needs more is all 0.

    Temperature (above 0), top-k, top-p, min-p, each as in transformers. Integers (int64), because their sums do not
    depend on the order: those of floats depend on the kernel, which depends on the batch.
    """
    # Minus the maximum, so that a tiny temperature cannot overflow; the likeliest token is exactly 1
    relative_BV = ((logits_BV.double() - logits_BV.amax(-1, keepdim=True)) / sampling.temperature).exp()
    if sampling.top_k is not None:
        smallest_kept_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        relative_BV = relative_BV.masked_fill(logits_BV < smallest_kept_B1, 0)
    # As fine as a sum over the vocabulary allows: 2**-45 of the likeliest token's for Llama 3's 128256
    weights_BV = (relative_BV * 2.0 ** (62 - logits_BV.shape[-1].bit_length())).long()
    if sampling.top_p is not None and sampling.top_p < 1:
        num_sorted = min(num_sorted or logits_BV.shape[-1], logits_BV.shape[-1])
        weights_BV = _within_top_p(weights_BV, logits_BV, sampling.top_p, num_sorted=num_sorted)
    if sampling.min_p is not None:
        weights_BV = weights_BV.masked_fill(relative_BV < sampling.min_p, 0)
    return weights_BV


def _within_top_p(weights_BV: Tensor, logits_BV: Tensor, top_p: float, *, num_sorted: int) -> Tensor:
    """The fewest of the likeliest tokens that hold `top_p` of the weight; of equal ones the first.

    Rows that need `num_sorted` tokens or more become 0. Sorting the whole vocabulary is slow on any device, and a few
    tokens mostly hold the weight.
    """
    total_B1, is_all = weights_BV.sum(-1, keepdim=True), num_sorted == logits_BV.shape[-1]
    logits_BK, tokens_BK = logits_BV.sort(descending=True) if is_all else logits_BV.topk(num_sorted)
    weights_BK = weights_BV.gather(-1, tokens_BK)
    before_BK = weights_BK.cumsum(-1) - weights_BK
    kept_BK = total_B1 - before_BK > (1 - top_p) * total_B1.double()
    kept_BK[:, 0] = True  # where 1 - top_p rounds to 1
    lowest_B1 = logits_BK.gather(-1, kept_BK.sum(-1, keepdim=True) - 1)
    num_lowest_B1 = (kept_BK & (logits_BK == lowest_B1)).sum(-1, keepdim=True)
    is_lowest_BV = logits_BV == lowest_B1
    # transformers keeps any of the equal ones; the first, as in greedy decoding, are the same in every batch
    kept_BV = (logits_BV > lowest_B1) | (is_lowest_BV & (is_lowest_BV.cumsum(-1) <= num_lowest_B1))
    if not is_all:
        kept_BV &= ~kept_BK[:, -1:]
    return weights_BV.masked_fill(~kept_BV, 0)


def uniform(seed: int, key: NoiseKey) -> float:
    """A number in [0, 1) from seed and key: the same on any rank, batch, device and torch version."""
    sample = f"\0{key.sample}" if key.sample else ""
    # NUL separates the parts, so a NUL within an id is doubled: different keys have different texts
    written = f"{seed}\0{str(key.prompt_id).replace(chr(0), chr(0) * 2)}\0{key.position}{sample}"
    person = b"integer id" if isinstance(key.prompt_id, int) else b""  # 1 is not "1"
    digest = blake2b(written.encode("utf-8", "surrogatepass"), digest_size=8, person=person).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, before sampling filters. `top`: the likeliest tokens first, of equal ones the lower id."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def check_logprobs(num_top: int | None, *, vocab_size: int) -> None:
    """Raise ConfigError for more tokens than the vocabulary has. 0: of the chosen token only, None: no logprobs."""
    if num_top is not None and not 0 <= num_top <= vocab_size:
        raise ConfigError(f"--logprobs is {num_top}; it must be from 0 to the vocabulary's {vocab_size} tokens")


def token_logprobs(logits_BV: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the token chosen from each row of finite logits, and of the `num_top` likeliest ones."""
    logits_BV = logits_BV.float()
    ids_BK = torch.tensor(tokens).view(-1, 1).to(logits_BV.device, non_blocking=True)
    if num_top:  # a few rows at a time, since sorting takes several times their memory
        top_BK = torch.cat([_likeliest(rows_BV, num_top) for rows_BV in torch.split(logits_BV, 8)])
        ids_BK = torch.cat([ids_BK, top_BK], dim=-1)
    logprobs_BK = logits_BV.log_softmax(-1).gather(-1, ids_BK)
    # One synchronization with the device; float64 holds ids and float32 exactly
    top_ids, logprobs = torch.stack([ids_BK.double(), logprobs_BK.double()]).tolist()
    return [
        TokenLogprobs(int(token), own, [(int(id), logprob) for id, logprob in zip(row_ids, row, strict=True)])
        for (token, *row_ids), (own, *row) in zip(top_ids, logprobs, strict=True)
    ]


def _likeliest(logits_BV: Tensor, num_top: int) -> Tensor:
    """Ids of the largest logits. Equal ones, of which bfloat16 has many, have the lower id first, as in argmax."""
    # Logit and id in one integer: the bits of floats sort like the floats once those of negative ones are inverted
    bits_BV = (logits_BV + 0.0).view(torch.int32)  # + 0.0 removes -0
    ordered_BV = torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV).long()
    ids_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    return ids_V.shape[0] - 1 - (ordered_BV * 2**31 + ids_V.flip(0)).topk(num_top).values % 2**31
