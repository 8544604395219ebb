"""Greedy tokens as transformers generates them, and how ours compare: every token, and what rounding excuses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CLOSE_CALL = 1e-4  # a gap between the reference's two likeliest tokens that rounding may turn over
MOST_EXCUSED = 1e-3  # of all tokens compared
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Greedy:
    """What transformers says after a prompt: tokens, the second likeliest in the place of each, and how far behind."""

    tokens: list[int]
    seconds: list[int]
    gaps: list[float]


@dataclass(slots=True)
class Comparison:
    """Tokens that were compared, and those that differ by the reference's own close call."""

    compared: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        wrong = f", {len(self.wrong)} WRONG" if self.wrong else ""
        return f"{self.compared:,} tokens compared, {self.excused} excused{wrong}"


def greedy(model, prompts: Sequence[Sequence[int]], num_new: int, *, batch: int = _BATCH) -> list[Greedy]:
    """`num_new` tokens after each prompt by transformers' generate(do_sample=False), padded on the left."""
    said = []
    for start in range(0, len(prompts), batch):
        padded, mask = _padded_left(prompts[start : start + batch])
        output = model.generate(
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
        best = torch.stack(output.logits, 1).topk(2)  # [B, new tokens, 2]
        tokens = output.sequences[:, padded.shape[1] :]
        seconds = torch.where(best.indices[..., 0] == tokens, best.indices[..., 1], best.indices[..., 0])
        gaps = best.values[..., 0] - best.values[..., 1]
        said += [Greedy(*each) for each in zip(tokens.tolist(), seconds.tolist(), gaps.tolist(), strict=True)]
    return said


@torch.inference_mode()
def full_forward(
    model, prompts: Sequence[Sequence[int]], said: Sequence[list[int]], *, batch: int | None = None
) -> Tensor:
    """transformers' logits [prompts, new tokens, V] that each token of `said` was chosen by: whole passes, no cache.

    `batch`: prompts in a pass; None: all.
    """
    num_new, whole = len(said[0]), [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, said, strict=True)]
    logits = []
    for start in range(0, len(whole), batch or len(whole)):
        padded, mask = _padded_left(whole[start : start + (batch or len(whole))])
        asked = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False, "logits_to_keep": num_new}
        logits.append(model(padded, attention_mask=mask, **asked).logits)
    return torch.cat(logits)


def compare(model, prompts: Sequence[Sequence[int]], ours: Sequence[list[int]], expected: list[Greedy]) -> Comparison:
    """Our tokens against `expected`, one by one; behind an excused one the reference goes on from what we said.

    A token that differs is excused where it is the reference's second, less than CLOSE_CALL behind its first.
    """
    result = Comparison()
    for prompt, said, reference in zip(prompts, ours, expected, strict=True):
        assert len(said) == len(reference.tokens)
        at = 0
        while True:
            differing = next((i for i in range(at, len(said)) if said[i] != reference.tokens[i - at]), None)
            if differing is None:
                result.compared += len(said) - at
                break
            result.compared += differing + 1 - at
            gap, second = reference.gaps[differing - at], reference.seconds[differing - at]
            if gap >= CLOSE_CALL or said[differing] != second:
                result.wrong.append(f"token {differing} after {len(prompt)} prompt tokens, at a gap of {gap:.2g}")
                break
            result.excused += 1
            at = differing + 1
            if at == len(said):
                break
            (reference,) = greedy(model, [[*prompt, *said[:at]]], len(said) - at)
    return result


def assert_same(
    model,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[list[int]],
    expected: list[Greedy],
    *,
    tell: Callable[[str], None] = lambda line: None,
    what: str = "",
) -> None:
    """Fail where a token differs without excuse, or too many do with one; `tell` hears the counts of `what`."""
    result = compare(model, prompts, ours, expected)
    tell(f"{what}: {result}")
    assert not result.wrong, result.wrong[:10]
    assert result.compared == sum(map(len, ours))
    assert result.excused <= MOST_EXCUSED * result.compared, str(result)


def ragged_prompts(*, num: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` random tokens; the first and the longest length are among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (num - 2,), generator=generator).tolist()]
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _padded_left(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask, [rows, longest] each."""
    longest = max(map(len, rows))
    missing = [longest - len(row) for row in rows]
    tokens = torch.tensor([[0] * num + list(row) for num, row in zip(missing, rows, strict=True)])
    mask = torch.tensor([[0] * num + [1] * (longest - num) for num in missing])
    return tokens, mask
