"""Every constant of the memory estimate that is not arithmetic: its value, where it comes from, what it holds for."""

from dataclasses import dataclass

from converters.sizes import GIB as GIB
from converters.sizes import MIB as MIB

HOPPER = 90


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU type.

    `usable_gib`: torch.cuda's total memory; `sm`: its compute capability, times ten; `cublas_mib`: workspace of one
    thread's cuBLAS handle.
    """

    name: str
    usable_gib: float
    sm: int
    cublas_mib: float


# usable_gib: H100-96 and A100 from torchtitan's logs (its "CUDA capacity" line); the others as torch.cuda reports them.
# cublas_mib: torch's default workspace (2.11 to 2.13): 32 MiB on sm90 and later, before that 2·4096 + 8·16 KiB.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80", 79.15, 80, 8.125),
        Gpu("h100-80", 79.11, HOPPER, 32),
        Gpu("h100-96", 95.04, HOPPER, 32),
        Gpu("h200", 139.8, HOPPER, 32),
        Gpu("b200", 178.3, 100, 32),
    )
}
# Symmetric memory: a signal pad in front of or behind what is asked for (CUDASymmetricMemoryTypes.hpp: 32 channels, 72
# peers, 4 bytes), all of it rounded up to the driver's granularity (CUDASymmetricMemory.cu), 2 MiB on NVIDIA's GPUs.
# torch 2.11 to 2.13, its own CUDA backend.
SIGNAL_PAD_BYTES = 32 * 72 * 4
SYMMETRIC_GRANULE = 2 * MIB
# Forward runs in the main thread, backward in autograd's: each has a cuBLAS handle of its own, with its own workspace.
CUBLAS_HANDLES = 2

# Not seen by torch's allocator. CUDA context: about 0.5 GB; NCCL: 0.2 to 1 GB per communicator, by others' reports, not
# measured here.
CONTEXT_GIB = 0.5
NCCL_GIB = (0.2, 1.0)
# How far an estimate of reserved memory may be off, as a share of it: the limit that the published peaks are held to,
# docs/memory_validation.md.
RESERVED_ERROR = 0.05
# Two engines further apart than this share of allocated memory: one of them is wrong.
ENGINES_AGREE = 0.02

# An embedding's backward, ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, torch 2.11 to 2.13: up to so
# many tokens need no sorting; of more, runs of so many rows for one token are summed apart.
EMBEDDING_UNSORTED_TOKENS = 3072
EMBEDDING_ROWS_PER_THREAD = 10


PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "recompute",
    "logits_and_loss",
    "all_gather",
    "reduce_scatter",
    "pipeline_buffers",
    "workspaces",
    "other",
)
