"""Weights of 16 bits on a CPU that multiplies no matrices of 16 bits: cast to fp32 for a product, a block at a time.

Such CPUs have no AVX-512, for bfloat16, or neither AVX-512 FP16 nor AMX, for float16. There torch multiplies in a loop
of its own: 512 rows of activations by a weight of 8192 × 2048 take one core 1.66 s in bfloat16 and 1.36 s in float16.
This way they take 0.25 s, as in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20  # cast at a time: what a CPU's cache holds
_FEW_ROWS = 4  # up to which torch's loop is as fast: it reads 16 bits where a cast writes and reads 32 more


class WidenedWeight:
    """Stands where a weight [N, K] stood, which it keeps: torch asks it to compute `F.linear(x, weight, bias)`.

    Sums are in fp32 and rounded once.
    """

    def __init__(self, weight_NK: Tensor):
        self.shape, self.dtype, self.num_bytes = weight_NK.shape, weight_NK.dtype, weight_NK.nbytes
        self._weight_NK = weight_NK

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        if func is not F.linear:
            return NotImplemented  # torch raises TypeError
        return cls._product(*args, **(kwargs or {}))

    @staticmethod
    def _product(input: Tensor, weight: "WidenedWeight", bias: Tensor | None = None) -> Tensor:
        weight_NK = weight._weight_NK
        if input.numel() <= _FEW_ROWS * input.shape[-1]:
            return F.linear(input, weight_NK, bias)
        num_rows, num_features = weight_NK.shape
        wide, out = input.float(), input.new_empty(*input.shape[:-1], num_rows)
        step = max(1, BLOCK_ELEMENTS // num_features)
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            out[..., rows] = F.linear(wide, weight_NK[rows].float(), None if bias is None else bias[rows].float())
        return out


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether many rows in `dtype` are multiplied at the device's full speed, by oneDNN on a CPU."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    try:
        if dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    except AttributeError:  # private to torch, there from 2.4 to 2.13 at least
        return True
