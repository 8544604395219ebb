"""Every constant of the memory estimate that is not arithmetic: its value, where it comes from, what it holds for."""

from dataclasses import dataclass

from converters.errors import ConfigError

MIB, GIB = 1024**2, 1024**3

# What the closed form was written against. A change in FSDP2 (what the root group keeps, buffer lifetimes) moves it.
TORCH_VERSIONS = "torch 2.11 to 2.13"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU type. `usable_gib`: torch.cuda's total memory; `cublas_mib`: workspace of one thread's cuBLAS handle."""

    name: str
    usable_gib: float
    cublas_mib: float


# usable_gib: H100-96 and A100 from torchtitan's logs (its "CUDA capacity" line); the others as torch.cuda reports them.
# cublas_mib: torch's default workspace (2.11 to 2.13): 32 MiB on sm90 and later, before that 2·4096 + 8·16 KiB.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80", 79.15, 8.125),
        Gpu("h100-80", 79.11, 32),
        Gpu("h100-96", 95.04, 32),
        Gpu("h200", 139.8, 32),
        Gpu("b200", 178.3, 32),
    )
}
# Forward runs in the main thread, backward in autograd's: each has a cuBLAS handle of its own, with its own workspace.
CUBLAS_HANDLES = 2

# A verdict needs reserved memory, and the closed form gives allocated only. In 24 published eager runs (torchtitan of
# 2024-12 to 2025-10, torch 2.6 to 2.9; Llama 3 8B and Qwen 3 32B; classic and expandable segments) reserved was 1.15 to
# 1.31 times what this estimates as allocated (tests/unit/titan_tools/test_memory_published.py); it is never below it.
RESERVED_OVER_ALLOCATED = (1.0, 1.35)
# Not seen by torch's allocator. CUDA context: about 0.5 GB; NCCL: up to 1 GB per communicator, by others' reports, not
# measured here.
CONTEXT_GIB = 0.5
NCCL_GIB = (0.0, 1.0)


def find_gpu(text: str) -> Gpu:
    """The GPU type of that name, or one of that many usable GiB (cuBLAS as on sm90). Raises ConfigError."""
    name = text.strip().lower()
    if name in GPUS:
        return GPUS[name]
    try:
        usable = float(name.removesuffix("gib"))
    except ValueError:
        usable = 0.0
    if not 0 < usable < 10_000:
        raise ConfigError(
            f"--gpu {text!r} is neither a GPU type nor a number of GiB",
            hint=f"types: {', '.join(GPUS)}",
            tries=[f"--gpu {close_gpu(name)}", "--gpu 47.5"],
        )
    return Gpu(f"{usable:g} GiB", usable, GPUS["h100-80"].cublas_mib)


def close_gpu(name: str) -> str:
    """The table's name nearest to what was typed."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, GPUS, 1, cutoff=0.3)), "h100-80")
