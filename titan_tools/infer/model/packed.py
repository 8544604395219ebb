"""Weights in the order in which oneDNN's kernels read them: on a CPU each product reads at memory's full speed.

torch's own product of one row in fp32 goes to MKL, which keeps one core busy, and in bfloat16 to oneDNN with rows of
weights as they come. Reordered once, while loading, both take half to two thirds of the time. This is what torch's
compiler does with constant weights when it freezes a model on a CPU, by the same two operators.
"""

import platform
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_BYTES = 1 << 20  # smaller ones lie in a core's cache, where the order makes no difference
_MEASURED_ON = ("x86_64", "AMD64")  # on ARM torch's own products go to oneDNN and its kernels already


class PackedWeight:
    """Stands where a weight [N, K] stood: torch asks it to compute `F.linear(x, weight, bias)`, and nothing else."""

    def __init__(self, weight_NK: Tensor):
        self.shape, self.dtype = weight_NK.shape, weight_NK.dtype
        self.num_bytes = weight_NK.numel() * weight_NK.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        if func is not F.linear:
            return NotImplemented  # torch raises TypeError
        return cls._product(*args, **(kwargs or {}))

    @staticmethod
    def _product(input: Tensor, weight: "PackedWeight", bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            bias = bias.contiguous()  # the operator does not look at strides
        return torch.ops.mkldnn._linear_pointwise(input, weight._packed, bias, "none", [], "")


def can_pack(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing a weight of these sizes is possible here and of use."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and prod(sizes) * dtype.itemsize >= _LEAST_BYTES
        and platform.machine() in _MEASURED_ON
        and torch.backends.mkldnn.is_available()
        and _works(dtype)
    )


@cache
def _works(dtype: torch.dtype) -> bool:
    """Try it. The operators are private to torch, there from 2.0 to 2.13, and CPUs without AVX-512 refuse bfloat16.

    Of small whole numbers every sum is exact, in whatever order.
    """
    weight_NK = (torch.arange(48 * 32).view(48, 32) % 7 - 3).to(dtype)
    x_3K = (torch.arange(3 * 32).view(3, 32) % 5 % 3 - 1).to(dtype)
    tried = [(x, bias) for x in (x_3K[:1], x_3K) for bias in (None, weight_NK[:, 1])]
    try:
        packed = PackedWeight(weight_NK)
        return all(torch.equal(F.linear(x, packed, bias), F.linear(x, weight_NK, bias)) for x, bias in tried)
    except (AttributeError, RuntimeError, TypeError):  # no such operator, not on this CPU, other arguments
        return False
