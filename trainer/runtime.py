"""Process-wide settings of a training run: seeding, deterministic mode, threads, and the garbage collector."""

import gc
import os

import torch
import torch.distributed as dist

from trainer.config.sections import Debug
from trainer.observability.log import note


def set_determinism(debug: Debug) -> None:
    """Seed torch's generators, for models that use random numbers; initial weights and data are seeded apart."""
    torch.manual_seed((debug.seed or 0) + dist.get_rank())
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses determinism without it
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)


def device_name(device: torch.device) -> str:
    """The device of a rank, for people."""
    return torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"


def cores_per_rank() -> int:
    """Number of threads of this rank that can work at once while the other ranks of this machine do the same."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class GarbageCollection:
    """Context around the loop that runs the garbage collector on all ranks at the same steps.

    Otherwise each rank would pause at a different time, and all others would wait for it. `collect` is called after
    every step and collects every `freq` steps, or with `debug` after each.
    """

    def __init__(self, freq: int, *, debug: bool):
        self._freq, self._debug = freq, debug

    def __enter__(self) -> "GarbageCollection":
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *exc_info: object) -> None:
        gc.enable()

    def collect(self, step: int) -> None:
        """With `debug` it reports what was found: reference cycles, which keep activations alive."""
        if not self._debug and step % self._freq:
            return
        num_found = gc.collect()
        if self._debug:
            note(f"step {step}: {num_found} objects that only the garbage collector could free")
