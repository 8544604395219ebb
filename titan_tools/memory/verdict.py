"""Whether a run fits a GPU, said no more surely than the estimate allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titan_tools.memory.allocator_settings import unmodelled_settings
from titan_tools.memory.constants import CONTEXT_GIB, GIB, NCCL_GIB, RESERVED_ERROR, Gpu
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.gpus import kernels_of
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


def assumptions_of(
    run: RunShape, gpu: Gpu, allocator: AllocatorName, *, has_symmetric_memory: bool = False
) -> tuple[str, ...]:
    """Of one run on one GPU type."""
    import torch

    low, high = NCCL_GIB
    said = [
        f"torch {torch.__version__}: its own FSDP2, tensor and pipeline parallelism, autograd and optimizers were run"
        f" on tensors without memory, with the kernels of {kernels_of(gpu)} (fused RMSNorm, fused attention)",
        f"{allocator} allocator, default settings; nothing but the train step keeps tensors alive: reference cycles,"
        " hooks and other users of the GPU add to this, so that it is a floor for what a run with a leak takes",
        "active equals allocated: with NCCL from torch 2.8 on, no block waits for another stream after it was freed",
        f"nvidia-smi: reserved ± {RESERVED_ERROR:.0%}, {CONTEXT_GIB:g} GiB of CUDA context, and"
        f" {low:g} to {high:g} GiB for each NCCL communicator",
        f"cuBLAS workspaces of {gpu.cublas_mib:g} MiB each for forward and backward",
    ]
    if has_symmetric_memory:
        said.append(
            "asynchronous tensor parallelism: symmetric memory of torch's own CUDA backend (TORCH_SYMMMEM not set), and"
            " two more cuBLAS workspaces, for the stream that multiplies every other piece"
        )
    if left_out := unmodelled_settings():
        said.append(f"PYTORCH_ALLOC_CONF here sets {', '.join(left_out)}, which is not modelled")
    if run.mesh.cp > 1:
        said.append(
            "context parallel: flash attention is taken for queries over gathered keys. Where torch finds no fused"
            " kernel for them it keeps all scores, and this is a floor"
        )
    return tuple(said)
