"""What `titan infer` says when it is done: the results, and how fast they came."""

import resource
import sys
from typing import Any

import torch
import torch.distributed as dist

from titan_tools.infer.generate import Completion
from titan_tools.infer.vocabulary import Vocabulary

GIB = 1024**3


def report(
    completions: list[Completion], vocabulary: Vocabulary, *, tp: int, dtype: str, seed: int, device: torch.device
) -> dict[str, Any]:
    """The object of `--json`. Memory is the largest of all ranks, so each of them must call this."""
    num_tokens = sum(len(c.tokens) for c in completions)
    num_later = num_tokens - len(completions)
    first_secs = sum(c.first_token_secs for c in completions)
    later_secs = sum(c.later_secs for c in completions)
    return {
        "results": [
            {
                "id": c.prompt.id,
                "prompt": c.prompt.text,
                "text": vocabulary.text(c.tokens),
                "prompt_tokens": c.prompt.tokens,
                "tokens": c.tokens,
                "finish_reason": c.finish_reason,
            }
            for c in completions
        ],
        "stats": {
            "ttft_ms": 1000 * first_secs / len(completions),
            "tpot_ms": 1000 * later_secs / num_later if num_later else None,  # there is no token after the first
            "tokens_per_sec": num_tokens / (first_secs + later_secs),
            "peak_memory_gib": _peak_bytes(tp, device) / GIB,
            "tp": tp,
            "dtype": dtype,
            "seed": seed,
        },
    }


def describe(stats: dict[str, Any]) -> str:
    """The stats in one line for people."""
    later = "" if stats["tpot_ms"] is None else f", then {stats['tpot_ms']:.1f} ms each"
    return (
        f"first token after {stats['ttft_ms']:.0f} ms{later} ({stats['tokens_per_sec']:.1f} tokens/s), "
        f"{stats['peak_memory_gib']:.2f} GiB per rank, tp {stats['tp']}, {stats['dtype']}"
    )


def _peak_bytes(tp: int, device: torch.device) -> int:
    """Most memory that any rank held: device memory on a GPU, else the whole process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if tp > 1:
        largest = torch.tensor(peak, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        peak = int(largest)
    return peak
