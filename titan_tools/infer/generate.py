"""Prefill in one pass, then one token at a time."""

from collections.abc import Collection
from dataclasses import dataclass
from time import perf_counter

import torch

from titan_tools.infer.cache import KVCache, attach_cache
from titan_tools.infer.load import SlicedModel
from titan_tools.infer.prompts import Prompt
from titan_tools.infer.sampling import Sampling, choose


@dataclass(frozen=True, slots=True)
class Completion:
    """What came after a prompt. `tokens` ends with the stop token where one was met."""

    prompt: Prompt
    tokens: list[int]
    finish_reason: str  # "stop": a stop token; "length": the limit
    first_token_secs: float  # prefill and the choice of the first token
    later_secs: float  # all other tokens together


@torch.inference_mode()
def complete(
    model: SlicedModel, prompt: Prompt, *, max_new_tokens: int, sampling: Sampling, stop_ids: Collection[int]
) -> Completion:
    """Generate after one prompt. Every rank runs this and, from the same logits, chooses the same tokens."""
    cache = attach_cache(model.body, room=len(prompt.tokens) + max_new_tokens)
    started = perf_counter()
    tokens = [_next_token(model, cache, prompt.tokens, sampling, prompt_id=prompt.id)]
    first_at = perf_counter()
    while tokens[-1] not in stop_ids and len(tokens) < max_new_tokens:
        tokens.append(_next_token(model, cache, tokens[-1:], sampling, prompt_id=prompt.id))
    return Completion(
        prompt,
        tokens,
        finish_reason="stop" if tokens[-1] in stop_ids else "length",
        first_token_secs=first_at - started,
        later_secs=perf_counter() - first_at,
    )


def _next_token(
    model: SlicedModel, cache: KVCache, new_tokens: list[int], sampling: Sampling, *, prompt_id: str
) -> int:
    tokens_BL = torch.tensor([new_tokens], device=model.device)
    logits_V = last_logits(model, cache, tokens_BL)[0]
    return choose(logits_V, sampling, prompt_id=prompt_id, position=cache.length)


def last_logits(model: SlicedModel, cache: KVCache, tokens_BL: torch.Tensor) -> torch.Tensor:
    """Run new tokens [B, L] behind what the cache holds; fp32 logits [B, V] of the last one."""
    positions_L = torch.arange(cache.length, cache.length + tokens_BL.shape[1], device=model.device)
    h_BLD = model.body(tokens_BL, positions_L)
    cache.length += tokens_BL.shape[1]
    return model.head(h_BLD[:, -1]).float()
