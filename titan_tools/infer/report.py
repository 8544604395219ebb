"""Results and statistics as `titan infer` prints them, and its progress bar."""

import re
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from converters.common.sizes import GIB
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, Timings
from titan_tools.infer.model.quantize import STORED
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import Request
from titan_tools.infer.task import Work
from titan_tools.terminal.console import count, tally
from trainer.ranks.gpus import data_sheet


def result_of(completion: Completion, *, samples: int = 1) -> dict[str, Any]:
    """One element of `results`, the same in a JSON object and in a line of a batch."""
    result = {
        "id": completion.prompt.id,
        "prompt": completion.prompt.text,
        "text": completion.text,
        "prompt_tokens": completion.prompt.tokens,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "logprobs": None if completion.logprobs is None else [asdict(one) for one in completion.logprobs],
    }
    return result if samples == 1 else {"id": result.pop("id"), "sample": completion.sample, **result}


def stats_of(timings: Timings, engine: Engine | None, ranks: TPRanks, work: Work, *, secs: float) -> dict[str, Any]:
    """The object `stats` of a run that took `secs`, without loading. What does not apply is None.

    - ttft_ms: from the beginning of a prompt's prefill until its first token; the mean over prompts.
    - tpot_ms: one decode step, which gives each sequence its next token; the mean over steps.
    - tokens_per_sec: all new tokens (with --score: all scored ones) over `secs`, less the time to compile decode steps
      and record them as CUDA graphs.
    - bandwidth_gb_per_sec: what decode steps read of one rank's memory, in 10^9 bytes: the weights once for all rows,
      and the keys and values of each row. An embedding that is not also the output is left out: a step reads one row of
      it for each sequence. Of experts, as many as the rows choose on average if all are equally likely.
    - bandwidth_share: as a share of the GPU's peak in its data sheet; None on a CPU.
    - peak_memory_gib: the most that one rank held (2^30 bytes): allocated on its GPU, or resident on a CPU.
    - dtype: of the weights; with --quantize "int8" or "float8"; where those of the checkpoint are kept, "float8" or
      "mxfp4".
    - quantize: that option; None without it.

    Every rank must call this, since they compare their memory.
    """
    steps, decode_secs = timings.num_decode_steps, timings.decode_secs
    gb_per_sec = None
    if steps and engine is not None:
        num_bytes = steps * engine.model.bytes_per_token + timings.expert_bytes_read + timings.cache_bytes_read
        gb_per_sec = num_bytes / decode_secs / 1e9
    peak = peak_gb_per_sec(ranks.device)
    return {
        "ttft_ms": 1000 * mean(timings.first_token_secs) if timings.first_token_secs else None,
        "tpot_ms": 1000 * decode_secs / steps if steps else None,  # None with a single new token
        "tokens_per_sec": timings.num_tokens / (secs - timings.prepare_secs) if timings.num_tokens else None,
        "bandwidth_gb_per_sec": gb_per_sec,
        "bandwidth_share": gb_per_sec / peak if gb_per_sec and peak else None,
        "peak_memory_gib": _peak_bytes(ranks) / GIB,
        "tp": work.tp,
        "dtype": work.weights_dtype,
        "seed": work.request.sampling.seed,
        "quantize": work.request.quantize,
    }


def describe(stats: dict[str, Any], *, num: int = 1) -> str:
    """The stats of `num` completions in one line of text."""
    parts = [count(num, "completion")] if num != 1 else []
    if stats["ttft_ms"] is not None:
        parts.append(f"first token after {stats['ttft_ms']:.0f} ms{' (mean)' if num != 1 else ''}")
    if stats["tpot_ms"] is not None:
        parts.append(f"then {stats['tpot_ms']:.1f} ms each")
    if stats["tokens_per_sec"] is not None:
        parts.append(f"{stats['tokens_per_sec']:.1f} tokens/s")
    if stats["bandwidth_share"] is not None:
        parts.append(f"{stats['bandwidth_share']:.0%} of the memory's bandwidth")
    dtype = f"{stats['dtype']} as stored" if stats["quantize"] == STORED else stats["dtype"]
    parts += [f"{stats['peak_memory_gib']:.2f} GiB per rank", f"tp {stats['tp']}", dtype]
    return ", ".join(parts)


def peak_gb_per_sec(device: torch.device) -> float | None:
    """The device's peak memory bandwidth, None if it is unknown, as on a CPU."""
    if device.type != "cuda":
        return None
    return data_sheet(torch.cuda.get_device_name(device)).gb_per_sec


def _peak_bytes(ranks: TPRanks) -> int:
    """The most memory that any rank held: allocated on its GPU, else resident in the process."""
    peak = torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else _peak_resident_bytes()
    return ranks.largest(peak)


def _peak_resident_bytes() -> int:
    """From VmHWM: ru_maxrss on Linux also counts what the process held before it executed this program."""
    if sys.platform == "linux" and (found := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def progress_bar(
    request: Request, ranks: TPRanks, total: int, what: str
) -> AbstractContextManager[Callable[..., None]]:
    """A progress bar on the first rank's terminal, unless result lines are printed there."""
    prints_lines = request.batch and not request.out and not request.as_json and sys.stdout.isatty()
    if not ranks.is_first or prints_lines:
        return nullcontext(lambda num=1: None)
    return tally(total, what)
