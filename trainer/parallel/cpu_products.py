"""Matrix products of 16-bit tensors on CPUs without instructions for them: computed in fp32, rounded once."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of many rows in `dtype` run at the device's full speed; on a CPU, by oneDNN."""
    if device.type != "cpu" or dtype not in _SIXTEEN_BITS:
        return True
    try:
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except AttributeError:  # private to torch (2.4 to 2.13)
        return True


@contextmanager
def fp32_products() -> Iterator[None]:
    """Context in which 16-bit products on a CPU, forward and backward, multiply and sum in fp32.

    Inputs keep their 16-bit values and results are rounded to 16 bits, as by CPUs and GPUs that have instructions for
    them. torch's own loop takes ten times as long or more. It replaces torch's CPU kernels of `mm`, `addmm`, `bmm` and
    `baddbmm` in this process, below autograd, DTensor and FSDP, and compiled code calls them too.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*overridden.*")
            for name in _PRODUCTS:
                for overload in (name, f"{name}.out"):
                    library.impl(  # type: ignore[no-untyped-call]
                        overload, _in_fp32(overload), "CPU", with_keyset=True
                    )
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _in_fp32(overload: str) -> Any:
    kernel = torch.library.get_kernel(f"aten::{overload}", "CPU")

    def product(keys: torch._C.DispatchKeySet, *tensors: Tensor, out: Tensor | None = None, **scalars: Any) -> Tensor:
        if tensors[0].dtype not in _SIXTEEN_BITS:
            result: Tensor = kernel.call_boxed(keys, *tensors, **scalars, **({} if out is None else {"out": out}))
            return result
        wide = getattr(torch, overload.removesuffix(".out"))(*(tensor.float() for tensor in tensors), **scalars)
        return wide.to(tensors[0].dtype) if out is None else out.copy_(wide)

    return product
