"""What `titan infer` says when it is done: the results, and how fast they came."""

import re
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from titan_tools.console import count
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, Timings
from titan_tools.infer.free_memory import GIB
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.task import Work
from trainer.gpus import data_sheet


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


def stats_of(timings: Timings, engine: Engine | None, ranks: Ranks, work: Work, *, secs: float) -> dict[str, Any]:
    """The object `stats` of a run that took `secs`, loading not included. What has no meaning in it is None.

    - ttft_ms: from the beginning of a prompt's prefill until its first token is chosen; the mean of a run's prompts.
    - tpot_ms: one decode step, which gives each sequence at work its next token; the mean of all steps.
    - tokens_per_sec: all new tokens (of a score: all scored ones) over `secs`, less what it took to compile decode
      steps and record them as CUDA graphs.
    - bandwidth_gb_per_sec: what decode steps read of one rank's memory, in 10^9 bytes: the weights once for all rows,
      and the keys and values that each row holds. An embedding that is not the output too is left out: of it a step
      reads one row for each sequence.
    - bandwidth_share: of what the data sheet of the GPU promises. None on a CPU, of which nobody told us that number.
    - peak_memory_gib: the most that one rank held (2^30 bytes): allocated on its GPU, or resident on a CPU.
    - dtype: what the weights are held in, "int8" and "float8" where they are quantized.

    Memory is compared among the ranks, so each of them must call this.
    """
    steps, decode_secs = timings.num_decode_steps, timings.decode_secs
    gb_per_sec = None
    if steps:
        model, num_cached = engine.model, timings.cache_tokens_read
        num_bytes = steps * model.bytes_per_token + num_cached * model.bytes_per_cached_token
        gb_per_sec = num_bytes / decode_secs / 1e9
    peak = peak_gb_per_sec(ranks.device)
    return {
        "ttft_ms": 1000 * mean(timings.first_token_secs) if timings.first_token_secs else None,
        "tpot_ms": 1000 * decode_secs / steps if steps else None,  # there is no token after the first
        "tokens_per_sec": timings.num_tokens / (secs - timings.prepare_secs) if timings.num_tokens else None,
        "bandwidth_gb_per_sec": gb_per_sec,
        "bandwidth_share": gb_per_sec / peak if gb_per_sec and peak else None,
        "peak_memory_gib": _peak_bytes(ranks) / GIB,
        "tp": work.tp,
        "dtype": work.request.quantize or work.dtype,
        "seed": work.request.sampling.seed,
    }


def describe(stats: dict[str, Any], *, num: int = 1) -> str:
    """The stats of `num` completions in one line for people."""
    told = [count(num, "completion")] if num != 1 else []
    if stats["ttft_ms"] is not None:
        told.append(f"first token after {stats['ttft_ms']:.0f} ms{' (mean)' if num != 1 else ''}")
    if stats["tpot_ms"] is not None:
        told.append(f"then {stats['tpot_ms']:.1f} ms each")
    if stats["tokens_per_sec"] is not None:
        told.append(f"{stats['tokens_per_sec']:.1f} tokens/s")
    if stats["bandwidth_share"] is not None:
        told.append(f"{stats['bandwidth_share']:.0%} of the memory's bandwidth")
    told += [f"{stats['peak_memory_gib']:.2f} GiB per rank", f"tp {stats['tp']}", stats["dtype"]]
    return ", ".join(told)


def peak_gb_per_sec(device: torch.device) -> float | None:
    """What the device's memory can deliver, None where it is not known, as on a CPU."""
    if device.type != "cuda":
        return None
    return data_sheet(torch.cuda.get_device_name(device)).gb_per_sec


def _peak_bytes(ranks: Ranks) -> int:
    """Most memory that any rank held: device memory on a GPU, else the whole process."""
    peak = torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else _peak_resident_bytes()
    if ranks.tp > 1:
        largest = torch.tensor(peak, device=ranks.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        peak = int(largest)
    return peak


def _peak_resident_bytes() -> int:
    """This program's own: Linux' ru_maxrss begins with what the process held before it became this program."""
    if sys.platform == "linux" and (told := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())):
        return int(told[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
