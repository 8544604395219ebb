"""Choose the next token: greedy, temperature, top-k, top-p; noise that never depends on who computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import torch

from converters.errors import CheckpointError, ConfigError


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
    problems, tries = [], []
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if not isfinite(temperature) or temperature < 0:
        problems.append(f"--temperature is {temperature}; it must be a number ≥ 0 (0 is greedy)")
    if top_k is not None and top_k < 1:
        problems.append(f"--top-k is {top_k}; it must be at least 1")
    if top_k is not None and vocab_size is not None and top_k > vocab_size:
        problems.append(f"--top-k is {top_k}, but the vocabulary has {vocab_size} tokens")
    if top_p is not None and not 0 < top_p <= 1:  # also catches NaN
        problems.append(f"--top-p is {top_p}; it must be above 0 and at most 1")
    if temperature == 0 and not problems:
        # Greedy would ignore them: what was asked for would not be what is done.
        problems += [
            f"--{name} has no effect at temperature 0" for name, value in _filters(sampling) if value is not None
        ]
        tries = ["--temperature 1"] if problems else []
    if problems:
        raise ConfigError("; ".join(problems), tries=tries)


def _filters(sampling: Sampling) -> list[tuple[str, float | None]]:
    return [("top-k", sampling.top_k), ("top-p", sampling.top_p)]


def choose(
    logits_BV: torch.Tensor, sampling: Sampling, seats: Sequence[Seat], *, seen_BV: torch.Tensor | None = None
) -> list[int]:
    """The next token of each sequence; `seen_BV` marks the tokens that a repetition penalty is for.

    Raises CheckpointError where logits are not finite.
    """
    for seat, finite in zip(seats, torch.isfinite(logits_BV).all(-1).tolist(), strict=True):
        if not finite:
            raise CheckpointError(
                f"the logits at position {seat.position} of prompt {seat.prompt_id!r} are not finite",
                hint="the weights hold NaN or infinity, or overflow in this dtype",
                tries=["--dtype float32"],
            )
    if seen_BV is not None:
        penalty = sampling.repetition_penalty
        penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    tokens = []
    for logits_V, seat in zip(logits_BV, seats, strict=True):
        cumulative_V = likely(logits_V, sampling).cumsum(0)
        # One number against the cumulative sum in token order: close ties between tokens cannot reorder anything, and a
        # token of probability 0 is never the first to pass the mark.
        mark = uniform(sampling.seed, seat) * cumulative_V[-1]
        tokens.append(int(torch.searchsorted(cumulative_V, mark, right=True)))
    return tokens


def likely(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities (float64) after temperature, top-k and top-p; filtered ones are 0, the rest may sum to less."""
    logits_V = logits_V.double()
    # The maximum goes first, so that a tiny temperature cannot overflow.
    scaled_V = (logits_V - logits_V.max()) / sampling.temperature
    if sampling.top_k is not None:
        smallest_kept = scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < smallest_kept, -torch.inf)
    probabilities_V = scaled_V.softmax(0)
    if sampling.top_p is None:
        return probabilities_V
    sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
    # The smallest set that reaches top_p: a token stays while what lies before it has not reached it.
    kept_V = torch.where(sorted_V.cumsum(0) - sorted_V < sampling.top_p, sorted_V, 0)
    return torch.zeros_like(probabilities_V).scatter_(0, order_V, kept_V)


def uniform(seed: int, seat: Seat) -> float:
    """A number in [0, 1) from seed and seat: the same on any rank, batch, device and torch version."""
    sample = f"\0{seat.sample}" if seat.sample else ""
    digest = blake2b(f"{seed}\0{seat.prompt_id}\0{seat.position}{sample}".encode(), digest_size=8).digest()
    # 52 bits, so that the product with a cumulative sum always stays below the sum
    return (int.from_bytes(digest, "little") >> 12) / 2**52
