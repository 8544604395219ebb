"""Speed, FLOP utilization and peak memory of a training run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from converters.common.sizes import GIB


@dataclass(frozen=True, slots=True)
class Throughput:
    """Speed since the last log line; rates are per second, TFLOP/s and MFU of one rank."""

    secs_per_step: float
    data_secs: float  # per step, waiting for its samples
    units_per_sec: float
    tflops_per_rank: float | None
    mfu: float | None


class StepClock:
    """Measures the steps between two log lines."""

    def __init__(self, *, flops_per_unit: int | None, num_ranks: int, peak: float | None):
        self._flops_per_unit = flops_per_unit
        self._num_ranks = num_ranks
        self._peak = peak
        self.restart()

    def restart(self) -> None:
        """Reset all counts."""
        self._num_units = 0
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
        """Context around loading a step's samples: part of the step's time, and also measured alone."""
        since = time.perf_counter()
        yield
        self._data_secs += time.perf_counter() - since

    def count_step(self, num_units: int) -> None:
        """Count a step over `num_units` units of progress of all ranks, padding included."""
        self._num_units += num_units
        self._num_steps += 1

    def read(self) -> Throughput:
        """The speed since the last call."""
        self.pause()
        secs = max(self._secs, 1e-9)
        units_per_sec = self._num_units / secs
        flops = units_per_sec * self._flops_per_unit / self._num_ranks if self._flops_per_unit is not None else None
        reading = Throughput(
            secs_per_step=secs / max(self._num_steps, 1),
            data_secs=self._data_secs / max(self._num_steps, 1),
            units_per_sec=units_per_sec,
            tflops_per_rank=None if flops is None else flops / 1e12,
            mfu=flops / self._peak if flops is not None and self._peak else None,
        )
        self.restart()
        return reading


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank: on a GPU what its allocator reserves and has in use, on a CPU what is resident."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "memory_gib": stats["reserved_bytes.all.peak"] / GIB,
            "memory_allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
            "memory_active_gib": stats["active_bytes.all.peak"] / GIB,
            "memory_capacity_gib": torch.cuda.get_device_properties(device).total_memory / GIB,
            "alloc_retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
        }
    import resource

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return {"memory_gib": resident}
