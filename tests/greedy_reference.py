"""Greedy tokens as transformers generates them, and how ours compare: every token, and what rounding excuses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

CLOSE_CALL = 1e-4  # a gap between the reference's two likeliest tokens that rounding may turn over
MOST_EXCUSED = 1e-3  # of all tokens compared
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Greedy:
    """What transformers says after a prompt, and how far ahead of the second each token was."""

    tokens: list[int]
    gaps: list[float]


@dataclass(slots=True)
class Comparison:
    """Tokens that were compared, and those that differ by the reference's own close call."""

    compared: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.compared} tokens compared, {self.excused} excused (gap < {CLOSE_CALL})"


def greedy(model, prompts: Sequence[Sequence[int]], num_new: int, *, batch: int = _BATCH) -> list[Greedy]:
    """`num_new` tokens after each prompt by transformers' generate(do_sample=False), padded on the left."""
    said = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        longest = max(map(len, some))
        padded = torch.tensor([[0] * (longest - len(p)) + list(p) for p in some])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in some])
        told = model.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_new,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(told.logits, 1).topk(2).values  # [B, new tokens, 2]
        gaps = (best[..., 0] - best[..., 1]).tolist()
        tokens = told.sequences[:, longest:].tolist()
        said += [Greedy(t, g) for t, g in zip(tokens, gaps, strict=True)]
    return said


def compare(model, prompts: Sequence[Sequence[int]], ours: Sequence[list[int]], expected: list[Greedy]) -> Comparison:
    """Our tokens against `expected`; behind an excused difference the reference goes on from what we said."""
    result = Comparison()
    for prompt, said, reference in zip(prompts, ours, expected, strict=True):
        assert len(said) == len(reference.tokens)
        at = 0
        while True:
            differing = next((i for i in range(at, len(said)) if said[i] != reference.tokens[i - at]), None)
            if differing is None:
                break
            gap = reference.gaps[differing - at]
            if gap >= CLOSE_CALL:
                result.wrong.append(f"token {differing} after {len(prompt)} prompt tokens, at a gap of {gap:.2g}")
                break
            result.excused += 1
            at = differing + 1
            if at == len(said):
                break
            (reference,) = greedy(model, [[*prompt, *said[:at]]], len(said) - at)
        result.compared += len(said)
    return result


def assert_same(model, prompts: Sequence[Sequence[int]], ours: Sequence[list[int]], expected: list[Greedy]) -> None:
    """Fail where a token differs without excuse, or too many do with one; print the counts."""
    result = compare(model, prompts, ours, expected)
    print(result)
    assert not result.wrong, result.wrong[:10]
    assert result.compared == sum(len(said) for said in ours)
    assert result.excused <= MOST_EXCUSED * result.compared, str(result)


def ragged_prompts(*, num: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` random tokens; the first and the longest length are among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (num - 2,), generator=generator).tolist()]
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
