"""What an estimate takes for granted, in sentences: versions, allocator, what is not counted."""

from titan_tools.memory.allocator_settings import unmodelled_settings
from titan_tools.memory.constants import CONTEXT_GIB, NCCL_GIB, RESERVED_ERROR, Gpu
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.gpus import kernels_of
from titan_tools.memory.replay.allocator import AllocatorName


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
