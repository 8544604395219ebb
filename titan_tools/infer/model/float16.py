"""float16 on a CPU: the same numbers as on a GPU, but few CPUs multiply matrices in it."""

import torch


def why_slow_in(dtype: torch.dtype, device: torch.device) -> str | None:
    """What to tell a user whose CPU has no float16 kernels; None where there is nothing to tell.

    One row of activations is as fast as in bfloat16. Of many, as a prompt has, torch's own loop takes three times
    float32's time (342 ms for 103, 512 rows by a weight of 4096 × 2048).
    """
    if dtype != torch.float16 or device.type != "cpu" or has_kernels():
        return None
    return "float16 has no kernels on this CPU, so prompts are read slowly; --dtype bfloat16 or float32 is faster"


def has_kernels() -> bool:
    """Whether oneDNN multiplies matrices in float16 on this CPU (AVX-512 FP16, AMX)."""
    try:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    except AttributeError:  # private to torch, and there from 2.4 to 2.13 at least
        return True
