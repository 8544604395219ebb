"""Watching a run from inside: torch's profiler traces, and snapshots of CUDA's memory, every few steps."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.sections import Profiling

if TYPE_CHECKING:
    import torch

_MOST_ALLOCATIONS = 100_000  # that a snapshot tells, the latest ones


def profiling_problems(settings: Profiling) -> list[str]:
    """A profiling cycle that is shorter than its warm-up and active steps."""
    needed = settings.profiler_warmup + settings.profiler_active
    if not settings.enable_profiling or needed <= settings.profile_freq:
        return []
    return [
        f"profiling.profile_freq = {settings.profile_freq} is less than the steps of a cycle, profiler_warmup"
        f" {settings.profiler_warmup} + profiler_active {settings.profiler_active}; nearest: {needed}"
    ]


def profiling_machine_problems(settings: Profiling, device: "torch.device") -> list[str]:
    """Memory snapshots are of CUDA's allocator."""
    if not settings.enable_memory_snapshot or device.type == "cuda":
        return []
    return ["profiling.enable_memory_snapshot: it records CUDA's allocator, and there is no CUDA device here"]


class Watch(Protocol):
    """Something that is told when a step is done."""

    def step(self) -> None: ...


class _Watches:
    """All that the config asks for; often nothing."""

    def __init__(self, watches: list[Watch]):
        self._watches = watches

    def step(self) -> None:
        for watch in self._watches:
            watch.step()


@contextmanager
def profiled(settings: Profiling, dump_folder: Path, *, rank: int, num_done: int) -> Iterator[Watch]:
    """Around the loop of a run that has done `num_done` steps; the loop calls `step()` after each of its own."""
    with ExitStack() as entered:
        watches: list[Watch] = []
        if settings.enable_profiling:
            folder = dump_folder / settings.save_traces_folder
            watches.append(entered.enter_context(_profiler(settings, folder, rank=rank, num_done=num_done)))
        if settings.enable_memory_snapshot:
            folder = dump_folder / settings.save_memory_snapshot_folder
            snapshots = MemorySnapshots(folder, rank=rank, num_done=num_done, every=settings.profile_freq)
            watches.append(entered.enter_context(snapshots))
        yield _Watches(watches)


def _profiler(settings: Profiling, folder: Path, *, rank: int, num_done: int) -> Any:
    """torch's profiler, whose cycles begin at multiples of profile_freq also in a run that was resumed in between."""
    from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of the cycle before: they are on disk
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
    """Records CUDA's allocations; writes them every few steps, and when memory runs out."""

    def __init__(self, folder: Path, *, rank: int, num_done: int, every: int):
        self._folder, self._rank, self._num_done, self._every = folder, rank, num_done, every

    def __enter__(self) -> "MemorySnapshots":
        import torch

        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        import torch

        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._write(f"{self._num_done + 1}_exit")  # the step that it happened in
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
