"""Whether a run fits a GPU, said no more surely than the estimate allows."""

from dataclasses import dataclass
from typing import Literal

from titan_tools.memory.constants import CONTEXT_GIB, NCCL_GIB, RESERVED_OVER_ALLOCATED, Gpu

FITS, DOES_NOT_FIT, TOO_CLOSE = "fits", "does not fit", "too close to call"
EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 1, TOO_CLOSE: 5}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`needed_gib` is the [low, high] of what the GPU must hold; margins are what is left of it at each end."""

    gpu: Gpu
    verdict: Literal["fits", "does not fit", "too close to call"]
    needed_gib: tuple[float, float]

    @property
    def margin_gib(self) -> tuple[float, float]:
        """Left over at the high and at the low end of what is needed; negative where it does not fit."""
        low, high = self.needed_gib
        return self.gpu.usable_gib - high, self.gpu.usable_gib - low


def judge(gpu: Gpu, *, allocated_gib: float, num_communicators: int, is_floor: bool = False) -> Verdict:
    """A verdict on an allocated peak. The need is allocated × the allocator's overhead + CUDA context + NCCL's buffers.

    Of a floor (`is_floor`) it is never said that it fits.
    """
    low, high = (
        allocated_gib * factor + CONTEXT_GIB + num_communicators * nccl
        for factor, nccl in zip(RESERVED_OVER_ALLOCATED, NCCL_GIB, strict=True)
    )
    if low > gpu.usable_gib:
        verdict = DOES_NOT_FIT
    else:
        verdict = FITS if high <= gpu.usable_gib and not is_floor else TOO_CLOSE
    return Verdict(gpu, verdict, (low, high))
