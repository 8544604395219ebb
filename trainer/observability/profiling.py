"""Profiling: torch.profiler traces and snapshots of CUDA memory every few steps."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.sections import Profiling
from trainer.ranks.machine import Device

if TYPE_CHECKING:
    from trainer.step import Phase

_MAX_ALLOCATIONS = 100_000  # in a snapshot, the latest ones


def profiling_problems(settings: Profiling) -> list[str]:
    """A profiling cycle that is shorter than its warm-up and active steps."""
    needed = settings.profiler_warmup + settings.profiler_active
    if not settings.enable_profiling or needed <= settings.profile_freq:
        return []
    return [
        f"profiling.profile_freq = {settings.profile_freq} is less than the steps of a cycle, profiler_warmup"
        f" {settings.profiler_warmup} + profiler_active {settings.profiler_active}; nearest: {needed}"
    ]


def profiling_machine_problems(settings: Profiling, device: Device) -> list[str]:
    """Memory snapshots are of CUDA's allocator."""
    if not settings.enable_memory_snapshot or device.type == "cuda":
        return []
    return ["profiling.enable_memory_snapshot: it records CUDA's allocator, and there is no CUDA device here"]


class PhaseNames:
    """A StepObserver that names the phases of a step in profiler traces."""

    def during(self, phase: "Phase", number: int = 0) -> AbstractContextManager[Any]:
        from torch.profiler import record_function

        return record_function(f"{phase} {number}" if phase == "forward_backward" else phase)


class StepProfiler(Protocol):
    """Advances when a step is done."""

    def step(self) -> None: ...


class _StepProfilers:
    """The profilers that the config enables, often none."""

    def __init__(self, profilers: list[StepProfiler]):
        self._profilers = profilers

    def step(self) -> None:
        for profiler in self._profilers:
            profiler.step()


@contextmanager
def profiled(settings: Profiling, dump_folder: Path, *, rank: int, num_done: int) -> Iterator[StepProfiler]:
    """Context around the loop of a run that has done `num_done` steps; the loop calls `step()` after each step."""
    with ExitStack() as entered:
        profilers: list[StepProfiler] = []
        if settings.enable_profiling:
            folder = dump_folder / settings.save_traces_folder
            profilers.append(entered.enter_context(_profiler(settings, folder, rank=rank, num_done=num_done)))
        if settings.enable_memory_snapshot:
            folder = dump_folder / settings.save_memory_snapshot_folder
            snapshots = MemorySnapshots(folder, rank=rank, num_done=num_done, every=settings.profile_freq)
            profilers.append(entered.enter_context(snapshots))
        yield _StepProfilers(profilers)


def _profiler(settings: Profiling, folder: Path, *, rank: int, num_done: int) -> Any:
    """torch's profiler, with cycles at multiples of profile_freq also in a resumed run."""
    from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of the previous cycle, which are on disk
    waiting = settings.profile_freq - settings.profiler_warmup - settings.profiler_active
    cycle = schedule(wait=waiting, warmup=settings.profiler_warmup, active=settings.profiler_active)

    def write(profiler: profile) -> None:
        path = _folder_of_step(folder, num_done + profiler.step_num) / f"rank{rank}_trace.json"
        profiler.export_chrome_trace(str(path))

    return profile(
        activities=supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA},  # type: ignore[no-untyped-call]
        schedule=lambda step: cycle(num_done + step),
        on_trace_ready=write,
        record_shapes=True,
    )


class MemorySnapshots:
    """Records CUDA allocations; writes a snapshot every few steps, and on out-of-memory errors."""

    def __init__(self, folder: Path, *, rank: int, num_done: int, every: int):
        self._folder, self._rank, self._num_done, self._every = folder, rank, num_done, every

    def __enter__(self) -> "MemorySnapshots":
        import torch

        torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        import torch

        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._write(f"{self._num_done + 1}_exit")  # the step that failed
        torch.cuda.memory._record_memory_history(enabled=None)

    def step(self) -> None:
        self._num_done += 1
        if self._num_done % self._every == 0:
            self._write(self._num_done)

    def _write(self, step: int | str) -> None:
        import torch

        path = _folder_of_step(self._folder, step) / f"rank{self._rank}_memory_snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def _folder_of_step(folder: Path, step: int | str) -> Path:
    made = folder / f"iteration_{step}"
    made.mkdir(parents=True, exist_ok=True)
    return made
