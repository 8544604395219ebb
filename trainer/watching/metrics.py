"""What a run tells while it goes: the console line, TensorBoard scalars, metrics.jsonl; and the sums behind them."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from converters.families.base import ModelArgs
from converters.names import RESUMED_FROM
from converters.sizes import GIB

METRICS_FILE = "metrics.jsonl"


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
    data_secs: float  # of a step, waiting for its samples
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
        self._data_secs = 0.0
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._secs += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Around the fetch of a step's samples: a part of the step, counted by itself too."""
        since = time.perf_counter()
        yield
        self._data_secs += time.perf_counter() - since

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
            data_secs=self._data_secs / max(self._num_steps, 1),
            tokens_per_sec=tokens_per_sec,
            tflops_per_rank=flops / 1e12,
            mfu=flops / self._peak if self._peak else None,
        )
        self.restart()
        return reading


def peak_memory(device: torch.device) -> dict[str, float | None]:
    """Most memory this rank has held: reserved on the device, of it in use at once; or resident on the CPU."""
    if device.type == "cuda":
        return {
            "memory_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
    import resource

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return {"memory_gib": resident, "memory_allocated_gib": None}


class MetricsLog:
    """Where records go: metrics.jsonl and the console, TensorBoard, or what there is of them on this rank."""

    def __init__(
        self,
        file: Path | None,
        *,
        console: str | None,
        tensorboard_folder: Path | None,
        color: bool,
        num_done: int | None = None,
    ):
        """`console`: the beginning of each line; None for no lines. `num_done`: the step at which a run resumes."""
        repeats = file is not None and num_done is not None and _last_step(file) > num_done
        self._file, self._console = _open_to_append(file) if file else None, console
        if repeats:  # the records of later steps, further up, are of a part that was given up
            self._file.write(json.dumps({"step": num_done, RESUMED_FROM: num_done}) + "\n")
        self._color = color and sys.stdout.isatty()
        self._tensorboard: Any = None
        if tensorboard_folder:
            from torch.utils.tensorboard import SummaryWriter  # here: it loads a quarter of Python

            self._tensorboard = SummaryWriter(str(tensorboard_folder))

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """A record of finite numbers: None stands for what is not known and is left out, as are NaN and infinity."""
        known = {name: value for name, value in scalars.items() if value is not None and math.isfinite(value)}
        if self._file:
            self._file.write(json.dumps({"step": step, **known}) + "\n")
        if self._tensorboard:
            for name, value in known.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def say(self, line: str) -> None:
        """A line of the run's log, on stdout."""
        if self._console is not None:
            line = self._console + line
            # in one write: lines of several ranks share the console
            print(f"\033[36m{line}\033[0m\n" if self._color else f"{line}\n", end="", flush=True)

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()


def _open_to_append(path: Path) -> TextIO:
    """Line by line, so that a killed run has told all it did; a resumed one appends and says its steps again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    file = path.open("a", buffering=1)
    if torn:  # the last run died within a line
        file.write("\n")
    return file


def _last_step(path: Path) -> int:
    """The highest step that a file has a record of; 0 where there is none."""
    steps = [0]
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, KeyError):  # a line that was cut off
            steps.append(int(json.loads(line)["step"]))
    return max(steps)


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
    if scalars["mfu"] is not None:
        parts.append(f"MFU {scalars['mfu']:.1%}")
    of_it = "" if scalars["memory_allocated_gib"] is None else f" ({scalars['memory_allocated_gib']:.2f} in use)"
    parts += [f"data {scalars['data_secs'] * 1000:.1f} ms", f"memory {scalars['memory_gib']:.2f} GiB{of_it}"]
    if scalars["skipped_steps"]:
        parts.append(f"skipped {scalars['skipped_steps']}")
    parts.append(f"ETA {_clock(eta_secs)}")
    return "  ".join(parts)


def _clock(secs: float) -> str:
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def note(text: str) -> None:
    """A line of talk from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
