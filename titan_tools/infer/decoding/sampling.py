"""Choose the next token: greedy, or by chance from what the filters leave, with noise that no batch or rank changes.

Shapes: B rows of a batch, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import torch
from torch import Tensor

from converters.errors import CheckpointError, ConfigError

_FEW = 1024  # tokens in which top-p's share mostly lies


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
class Seat:
    """Which token of which sequence is being chosen: what its noise is drawn from, beside the seed."""

    prompt_id: str | int
    sample: int
    position: int  # counted from the prompt's start


def check_sampling(sampling: Sampling, *, vocab_size: int | None = None) -> None:
    """Raise ConfigError with every value that cannot be; `vocab_size` bounds top-k once the checkpoint is known."""
    problems, tries = list(_problems(sampling, vocab_size)), []
    if sampling.temperature == 0 and not problems:
        # Greedy would ignore them: what was asked for would not be what is done.
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
    logits_BV: Tensor, sampling: Sampling, seats: Sequence[Seat], *, penalized_BV: Tensor | None = None
) -> list[int]:
    """The next token of each sequence; `penalized_BV` marks the tokens that a repetition penalty is for.

    A row's token is the same alone and in any batch. The host waits for the device once. Raises CheckpointError where
    logits are not finite.
    """
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if penalized_BV is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        reduced_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
        logits_BV = torch.where(penalized_BV, reduced_BV, logits_BV)
    lowest_B, highest_B = logits_BV.aminmax(dim=-1)
    finite_B = (lowest_B > -torch.inf) & (highest_B < torch.inf)  # false for NaN too
    if sampling.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
    else:
        noise_B1 = torch.tensor([[uniform(sampling.seed, seat)] for seat in seats], dtype=torch.float64)
        noise_B1 = noise_B1.to(logits_BV.device, non_blocking=True)
        tokens_B = _draw(token_weights(logits_BV, sampling, num_sorted=_FEW), noise_B1)
    finite, tokens = torch.stack([finite_B.long(), tokens_B]).tolist()
    for seat, is_finite in zip(seats, finite, strict=True):
        if not is_finite:
            raise CheckpointError(
                f"the logits at position {seat.position} of prompt {seat.prompt_id!r} are not finite",
                hint="the weights hold NaN or infinity, or overflow in this dtype",
                tries=["--dtype float32"],
            )
    if logits_BV.shape[-1] in tokens:  # the few were too few for top-p
        tokens = _draw(token_weights(logits_BV, sampling), noise_B1).tolist()
    return tokens


def _draw(weights_BV: Tensor, noise_B1: Tensor) -> Tensor:
    """One token of each row; the size of the vocabulary where all weights are 0.

    One number against the cumulative sum in token order: close ties between tokens cannot reorder anything, and a token
    of weight 0 is never the first to pass the mark.
    """
    cumulative_BV = weights_BV.cumsum(-1)
    # noise is at most 1 - 2**-52, a step of float64 below 1: the product stays below the sum, whatever is rounded
    marks_B1 = (noise_B1 * cumulative_BV[:, -1:].double()).long()
    return torch.searchsorted(cumulative_BV, marks_B1, right=True)[:, 0]


def token_weights(logits_BV: Tensor, sampling: Sampling, *, num_sorted: int | None = None) -> Tensor:
    """How likely each token is drawn: whole numbers [B, V] to be read against their sum, 0 for what is filtered out.

    `num_sorted`: how many of the likeliest tokens top-p looks at (None: all). A row that needs more is all 0.

    Temperature (above 0), top-k, top-p, min-p, each as in transformers. Whole numbers (int64), because their sums come
    out the same in any order: a float's depend on the kernel, which depends on the batch.
    """
    # The maximum goes first, so that a tiny temperature cannot overflow; the likeliest token is at exactly 1.
    relative_BV = ((logits_BV.double() - logits_BV.amax(-1, keepdim=True)) / sampling.temperature).exp()
    if sampling.top_k is not None:
        smallest_kept_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        relative_BV = relative_BV.masked_fill(logits_BV < smallest_kept_B1, 0)
    # as fine as a sum over the vocabulary has room for: 2**-45 of the likeliest token's for Llama 3's 128256
    weights_BV = (relative_BV * 2.0 ** (62 - logits_BV.shape[-1].bit_length())).long()
    if sampling.top_p is not None and sampling.top_p < 1:
        num_sorted = min(num_sorted or logits_BV.shape[-1], logits_BV.shape[-1])
        weights_BV = _within_top_p(weights_BV, logits_BV, sampling.top_p, num_sorted=num_sorted)
    if sampling.min_p is not None:
        weights_BV = weights_BV.masked_fill(relative_BV < sampling.min_p, 0)
    return weights_BV


def _within_top_p(weights_BV: Tensor, logits_BV: Tensor, top_p: float, *, num_sorted: int) -> Tensor:
    """The fewest of the likeliest tokens that hold `top_p` of the weight; of equal ones the first.

    Nothing in rows where these are not fewer than `num_sorted`, or all. To sort a vocabulary is slow on any device, and
    the weight mostly lies in a few tokens.
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
    # transformers keeps any of the equal ones; the first, as for greedy, are the same in every batch
    kept_BV = (logits_BV > lowest_B1) | (is_lowest_BV & (is_lowest_BV.cumsum(-1) <= num_lowest_B1))
    if not is_all:
        kept_BV &= ~kept_BK[:, -1:]
    return weights_BV.masked_fill(~kept_BV, 0)


def uniform(seed: int, seat: Seat) -> float:
    """A number in [0, 1) from seed and seat: the same on any rank, batch, device and torch version."""
    sample = f"\0{seat.sample}" if seat.sample else ""
    # A NUL divides the parts, so one within an id is doubled: no two seats are written alike.
    written = f"{seed}\0{str(seat.prompt_id).replace(chr(0), chr(0) * 2)}\0{seat.position}{sample}"
    person = b"integer id" if isinstance(seat.prompt_id, int) else b""  # 1 is not "1"
    digest = blake2b(written.encode("utf-8", "surrogatepass"), digest_size=8, person=person).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52
