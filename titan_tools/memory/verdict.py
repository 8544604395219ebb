"""Whether a run fits a GPU, said no more surely than the estimate allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titan_tools.memory.constants import CONTEXT_GIB, GIB, NCCL_GIB, RESERVED_ERROR, Gpu
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.replay import replay
from titan_tools.memory.trace.events import Trace

FITS, DOES_NOT_FIT, TOO_CLOSE = "fits", "does not fit", "too close to call"
EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 1, TOO_CLOSE: 5}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`needed_gib` is the [low, high] of what nvidia-smi will show on the fullest rank."""

    gpu: Gpu
    verdict: Literal["fits", "does not fit", "too close to call"]
    needed_gib: tuple[float, float]

    @property
    def margin_gib(self) -> tuple[float, float]:
        """Left over at the high and at the low end of what is needed; negative where it does not fit."""
        low, high = self.needed_gib
        return self.gpu.usable_gib - high, self.gpu.usable_gib - low


def nvidia_smi_gib(reserved_bytes: int, *, num_communicators: int, symmetric_bytes: int = 0) -> tuple[float, float]:
    """[low, high] of a rank's memory as the driver counts it: the allocator's, CUDA's context and NCCL's buffers.

    `symmetric_bytes`: of symmetric memory, which is asked of the driver beside the allocator.
    """
    low, high = (
        reserved_bytes / GIB * factor + symmetric_bytes / GIB + CONTEXT_GIB + num_communicators * nccl
        for factor, nccl in zip((1 - RESERVED_ERROR, 1 + RESERVED_ERROR), NCCL_GIB, strict=True)
    )
    return low, high


def judge(
    gpu: Gpu, *, reserved_bytes: int, traces: Sequence[Trace], allocator: AllocatorName, num_communicators: int
) -> Verdict:
    """A verdict on the fullest rank's reserved peak; `traces` of all ranks, for where that alone does not decide.

    Reserved memory above what there is does not mean that a run fails: an allocator that meets the limit first gives
    back what it has cached. Whether that is enough is asked by replaying the traces within that limit.
    """
    beside = max(trace.symmetric_bytes for trace in traces)
    low, high = needed = nvidia_smi_gib(reserved_bytes, num_communicators=num_communicators, symmetric_bytes=beside)
    if high <= gpu.usable_gib:
        return Verdict(gpu, FITS, needed)
    if low <= gpu.usable_gib:
        return Verdict(gpu, TOO_CLOSE, needed)
    left_gib = (gpu.usable_gib - beside / GIB - CONTEXT_GIB - num_communicators * NCCL_GIB[0]) * (1 + RESERVED_ERROR)
    limit = max(round(left_gib * GIB), 0)
    ends = (replay(trace, allocator=allocator, capacity_bytes=limit).out_of_memory for trace in traces)
    return Verdict(gpu, DOES_NOT_FIT if any(ends) else TOO_CLOSE, needed)
