"""Whether a run fits a GPU, as an interval of what nvidia-smi will show, and what that assumes."""

from dataclasses import dataclass
from typing import Literal

from converters.common.sizes import GIB
from titan_tools.memory.allocator_settings import unmodelled_settings
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.replay import replay
from titan_tools.memory.trace.events import Trace
from trainer.ranks.gpus import DEFAULT_GPU, GPUS, Gpu

VerdictName = Literal["fits", "does not fit", "too close to call"]
FITS: VerdictName = "fits"
DOES_NOT_FIT: VerdictName = "does not fit"
TOO_CLOSE: VerdictName = "too close to call"
EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 1, TOO_CLOSE: 5}
# How far an estimate of reserved memory may be off, as a share of it: the limit that the published peaks are held to,
# docs/memory_validation.md.
RESERVED_ERROR = 0.05
# Not visible to torch's allocator. CUDA context: about 0.5 GB; NCCL: 0.2 to 1 GB per communicator. Others' reports, not
# measured here.
CONTEXT_GIB = 0.5
NCCL_GIB = (0.2, 1.0)
_NOT_COMPARED = "2.16"  # the torch from which estimates were not compared with real steps


@dataclass(frozen=True, slots=True)
class Verdict:
    """`needed_gib` is the [low, high] of what nvidia-smi will show on the fullest rank."""

    gpu: Gpu
    verdict: VerdictName
    needed_gib: tuple[float, float]

    @property
    def margin_gib(self) -> tuple[float, float]:
        """What remains at the high and at the low end of what is needed; negative if it does not fit."""
        low, high = self.needed_gib
        return self.gpu.usable_gib - high, self.gpu.usable_gib - low


def nvidia_smi_gib(reserved_bytes: int, *, num_communicators: int, symmetric_bytes: int = 0) -> tuple[float, float]:
    """[low, high] of a rank's memory as the driver counts it: the allocator's, CUDA's context and NCCL's buffers.

    `symmetric_bytes`: of symmetric memory, which the driver allocates outside of torch's allocator.
    """
    low, high = (
        reserved_bytes / GIB * factor + symmetric_bytes / GIB + CONTEXT_GIB + num_communicators * nccl
        for factor, nccl in zip((1 - RESERVED_ERROR, 1 + RESERVED_ERROR), NCCL_GIB, strict=True)
    )
    return low, high


def judge(gpu: Gpu, *, reserved_bytes: int, trace: Trace, allocator: AllocatorName, num_communicators: int) -> Verdict:
    """A verdict on the fullest rank's reserved peak and its trace.

    A run may need less than it reserves: at the limit, an allocator first frees what it has cached. So where the
    reserved peak does not fit, the trace is replayed within the limit.
    """
    symmetric = trace.symmetric_bytes
    low, high = needed = nvidia_smi_gib(reserved_bytes, num_communicators=num_communicators, symmetric_bytes=symmetric)
    if high <= gpu.usable_gib:
        return Verdict(gpu, FITS, needed)
    if low <= gpu.usable_gib:
        return Verdict(gpu, TOO_CLOSE, needed)
    left_gib = gpu.usable_gib - symmetric / GIB - CONTEXT_GIB - num_communicators * NCCL_GIB[0]
    limit = max(round(left_gib * (1 + RESERVED_ERROR) * GIB), 0)
    runs_out = replay(trace, allocator=allocator, capacity_bytes=limit).out_of_memory
    return Verdict(gpu, DOES_NOT_FIT if runs_out else TOO_CLOSE, needed)


def assumptions_of(
    gpu: Gpu,
    allocator: AllocatorName,
    *,
    num_communicators: int,
    uses_cp: bool,
    has_symmetric_memory: bool,
    imbalance: float | None = None,
) -> tuple[str, ...]:
    """What an estimate assumes of a run on a GPU type, in sentences.

    `imbalance`: what verdicts assume; None if memory does not depend on the router.
    """
    import torch

    kernels = gpu.name if gpu.name in GPUS else DEFAULT_GPU.name  # of a GPU that is given by its GiB only
    low, high = NCCL_GIB
    lines = [
        f"torch {torch.__version__}: its own FSDP2, tensor and pipeline parallelism, autograd and optimizers were run"
        f" on fake tensors, with the kernels of {kernels} (fused RMSNorm, fused attention)",
        f"{allocator} allocator with default settings. Only the train step keeps tensors alive: reference cycles,"
        " hooks and other processes on the GPU need memory in addition, so the estimate is a lower bound for a run that"
        " leaks",
        "active memory equals allocated memory: with NCCL, since torch 2.8, no freed block waits for another stream",
        f"nvidia-smi: reserved ± {RESERVED_ERROR:.0%}, {CONTEXT_GIB:g} GiB of CUDA context, and"
        f" {low:g} to {high:g} GiB for each NCCL communicator, of which the fullest rank has {num_communicators}",
        f"cuBLAS workspaces of {gpu.cublas_mib:g} MiB each for forward and backward",
    ]
    if gpu.is_amd:
        lines.append(
            f"{gpu.name}: ROCm's allocator, attention and hipBLAS workspaces are estimated as CUDA's, without a"
            " comparison with a run on AMD's GPUs"
        )
    if torch.__version__ >= _NOT_COMPARED:
        lines.append(
            "what a step asks for was compared with real steps up to torch 2.15, and may differ under a later one:"
            " leave a margin"
        )
    if has_symmetric_memory:
        lines.append(
            "asynchronous tensor parallelism: symmetric memory of torch's own CUDA backend (TORCH_SYMMMEM not set), and"
            " two more cuBLAS workspaces, for the stream that multiplies every other piece"
        )
    if imbalance is not None:
        lines.append(
            "expert parallelism: tokens are spread evenly over the experts, but for the verdicts. They assume that the"
            f" experts of the fullest rank receive {imbalance:g} times the mean of all ranks, in every layer at once"
            " (--imbalance)"
        )
    if left_out := unmodelled_settings():
        lines.append(f"PYTORCH_ALLOC_CONF sets {', '.join(left_out)}, which is not modelled")
    if uses_cp:
        lines.append(
            "context parallel: queries attend to gathered keys with cuDNN's attention on Hopper, else with flash"
            " attention. Where torch finds no fused kernel it keeps all scores, and the estimate is a lower bound"
        )
    return tuple(lines)
