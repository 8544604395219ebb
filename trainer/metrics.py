"""What a run tells while it goes: the console line, TensorBoard scalars, metrics.jsonl; and the sums behind them."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converters.families.base import ModelArgs

METRICS_FILE = "metrics.jsonl"
_GIB = 1024**3
# Dense bf16 FLOP/s of one device, vendor's figure; the first name found in the device's name counts.
_PEAK_FLOPS = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H800", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
)


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device, None where it is not known."""
    return next((flops for name, flops in _PEAK_FLOPS if name in device_name), None)


def flops_per_token(args: ModelArgs, *, num_parameters: int, seq_len: int) -> int:
    """6·N + 12·L·d·s: forward and backward of the matrix products, and of full (not causal) attention.

    N leaves the input embedding out, which is a look-up; a tied one stays in, since it is the output projection too.
    Published MFU figures use this count (torchtitan, NVIDIA's benchmarks), so ours can be held against them.
    """
    num_matmul = num_parameters - (0 if args.tied else args.vocab_size * args.dim)
    return 6 * num_matmul + 12 * args.num_layers * args.num_heads * args.head_dim * seq_len


@dataclass(frozen=True, slots=True)
class Throughput:
    """Speed since the last log line; rates are per second, TFLOP/s and MFU of one rank."""

    secs_per_step: float
    tokens_per_sec: float
    tflops_per_rank: float
    mfu: float | None


class StepClock:
    """Measures the steps between two log lines."""

    def __init__(self, *, flops_per_token: int, num_ranks: int, peak: float | None):
        self._flops_per_token = flops_per_token
        self._num_ranks = num_ranks
        self._peak = peak
        self.restart()

    def restart(self) -> None:
        """Begin anew: what lay in between (validation, a checkpoint) is not training time."""
        self._num_tokens = 0
        self._num_steps = 0
        self._secs = 0.0
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._secs += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def count_step(self, num_tokens: int) -> None:
        """One step over `num_tokens` tokens of all ranks, padding included: the work does not care for targets."""
        self._num_tokens += num_tokens
        self._num_steps += 1

    def read(self) -> Throughput:
        """The speed since the last reading."""
        self.pause()
        secs = max(self._secs, 1e-9)
        tokens_per_sec = self._num_tokens / secs
        flops = tokens_per_sec * self._flops_per_token / self._num_ranks
        reading = Throughput(
            secs_per_step=secs / max(self._num_steps, 1),
            tokens_per_sec=tokens_per_sec,
            tflops_per_rank=flops / 1e12,
            mfu=flops / self._peak if self._peak else None,
        )
        self.restart()
        return reading


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank has held: reserved on the device, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / _GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


class MetricsLog:
    """Writes records to metrics.jsonl and TensorBoard, and lines to the console; only the rank that logs has one."""

    def __init__(self, dump_folder: Path, *, tensorboard_folder: Path | None, color: bool):
        dump_folder.mkdir(parents=True, exist_ok=True)
        # Line by line, so that a killed run has told all it did; a resumed one appends and says its steps again.
        path = dump_folder / METRICS_FILE
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a", buffering=1)
        if torn:  # the last run died within a line
            self._file.write("\n")
        self._color = color and sys.stdout.isatty()
        self._tensorboard: Any = None
        if tensorboard_folder:
            from torch.utils.tensorboard import SummaryWriter  # here: it loads a quarter of Python

            self._tensorboard = SummaryWriter(str(tensorboard_folder))

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """A record of finite numbers; None stands for what is not known and is left out."""
        known = {name: value for name, value in scalars.items() if value is not None}
        self._file.write(json.dumps({"step": step, **known}) + "\n")
        if self._tensorboard:
            for name, value in known.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def say(self, line: str) -> None:
        """A line of the run's log, on stdout."""
        print(f"\033[36m{line}\033[0m" if self._color else line, flush=True)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()


def step_line(step: int, scalars: Mapping[str, float | None], *, eta_secs: float) -> str:
    """The console line of a step."""
    parts = [
        f"step {step:>6}",
        f"loss {scalars['loss']:.4f}",
        f"grad_norm {scalars['grad_norm']:.4f}",
        f"lr {scalars['lr']:.2e}",
        f"tokens/s {scalars['tokens_per_sec']:,.0f}",
        f"TFLOP/s {scalars['tflops_per_rank']:.{2 if scalars['tflops_per_rank'] >= 1 else 4}f}",
    ]
    if scalars.get("mfu") is not None:
        parts.append(f"MFU {scalars['mfu']:.1%}")
    parts += [f"memory {scalars['memory_gib']:.2f} GiB", f"ETA {_clock(eta_secs)}"]
    return "  ".join(parts)


def _clock(secs: float) -> str:
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def note(text: str) -> None:
    """A line of talk from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
