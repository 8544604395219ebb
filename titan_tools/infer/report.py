"""What `titan infer` says when it is done: the results, and how fast they came."""

import resource
import sys
from dataclasses import asdict
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from titan_tools.infer.engine import Engine
from titan_tools.infer.generate import Completion, Timings
from titan_tools.infer.ranks import Ranks
from titan_tools.infer.task import Work

GIB = 1024**3


def result_of(completion: Completion, *, samples: int = 1) -> dict[str, Any]:
    """One element of `results`, the same in a JSON object and in a line of a batch."""
    result = {
        "id": completion.prompt.id,
        "prompt": completion.prompt.text,
        "text": completion.text,
        "prompt_tokens": completion.prompt.tokens,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": None if completion.logprobs is None else [asdict(told) for told in completion.logprobs],
    }
    return result if samples == 1 else {"id": result.pop("id"), "sample": completion.sample, **result}


def stats_of(timings: Timings, engine: Engine, ranks: Ranks, work: Work, *, secs: float) -> dict[str, Any]:
    """The object `stats`. Memory is the largest of all ranks, so each of them must call this."""
    steps, decode_secs = timings.num_decode_steps, timings.decode_secs
    gb_per_sec = None
    if steps:
        num_bytes = steps * engine.model.bytes_per_token + timings.cache_tokens_read * engine.bytes_per_cached_token
        gb_per_sec = num_bytes / decode_secs / 1e9
    peak = peak_gb_per_sec(ranks.device)
    return {
        "ttft_ms": 1000 * mean(timings.first_token_secs) if timings.first_token_secs else None,
        "tpot_ms": 1000 * decode_secs / steps if steps else None,  # there is no token after the first
        "tokens_per_sec": timings.num_tokens / secs,
        "bandwidth_gb_per_sec": gb_per_sec,
        "bandwidth_share": gb_per_sec / peak if gb_per_sec and peak else None,
        "peak_memory_gib": _peak_bytes(ranks) / GIB,
        "tp": ranks.tp,
        "dtype": work.request.quantize or work.dtype,
        "seed": work.request.sampling.seed,
    }


def describe(stats: dict[str, Any]) -> str:
    """The stats in one line for people."""
    later = "" if stats["tpot_ms"] is None else f", then {stats['tpot_ms']:.1f} ms each"
    return (
        f"first token after {stats['ttft_ms']:.0f} ms{later} ({stats['tokens_per_sec']:.1f} tokens/s), "
        f"{stats['peak_memory_gib']:.2f} GiB per rank, tp {stats['tp']}, {stats['dtype']}"
    )


# Memory bandwidth in GB/s as the makers' data sheets give it; the longer names first
_PEAK_BANDWIDTH = (
    ("H100 NVL", 3938),
    ("H100 PCIe", 2039),
    ("H100", 3352),
    ("GH200", 4000),
    ("H200", 4800),
    ("B200", 8000),
    ("A100-SXM4-40GB", 1555),
    ("A100-PCIE-40GB", 1555),
    ("A100", 2039),
    ("L40S", 864),
    ("MI300X", 5300),
)


def peak_gb_per_sec(device: torch.device) -> float | None:
    """What the device's memory can deliver, None where it is not known, as on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for known, peak in _PEAK_BANDWIDTH if known in name), None)


def _peak_bytes(ranks: Ranks) -> int:
    """Most memory that any rank held: device memory on a GPU, else the whole process."""
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(ranks.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if ranks.tp > 1:
        largest = torch.tensor(peak, device=ranks.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        peak = int(largest)
    return peak
