"""Have Inductor generate code for a GPU that is not there, and run that code without its kernels.

What the code allocates, reuses and frees stays as it is.
"""

import ast
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.scheduler
import torch.utils._triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.select_algorithm import extern_kernels

from converters.common.sizes import GIB, MIB
from titan_tools.memory.trace.async_tensor import fused_products

FILE_NAME = "<Inductor's code>"  # in tracebacks


@dataclass(frozen=True, slots=True)
class _H100:
    """An H100 SXM (CUDA C++ programming guide, compute capability 9.0). The numbers decide how reductions are split."""

    name: str = "NVIDIA H100"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 50 * MIB
    total_memory: int = 80 * GIB
    warp_size: int = 32
    gcnArchName: str = ""


_GPU = _H100()


@contextmanager
def describe_gpu() -> Iterator[None]:
    """Describe a GPU and Triton to Inductor, enough to generate code for them."""
    with ExitStack() as patches:
        static: tuple[tuple[Any, str, Any], ...] = (
            (CudaInterface, "get_device_properties", _properties),
            (CudaInterface, "get_compute_capability", lambda device=None: _GPU.major * 10 + _GPU.minor),
            (CudaInterface, "is_bf16_supported", lambda including_emulation=False: True),
            (CudaInterface, "current_device", lambda: 0),
            (CudaInterface.Worker, "get_device_properties", _properties),
            (CudaInterface.Worker, "current_device", lambda: 0),
        )
        plain: tuple[tuple[Any, str, Any], ...] = (
            (torch.cuda, "get_device_properties", _properties),
            (torch.cuda, "get_device_capability", lambda device=None: (_GPU.major, _GPU.minor)),
            (torch.cuda, "current_device", lambda: 0),
            (torch._inductor.scheduler, "has_triton", lambda: True),
            (torch.utils._triton, "triton_hash_with_backend", lambda: ""),  # names a cache that is not used
        )
        for owner, name, value in (*((owner, name, staticmethod(value)) for owner, name, value in static), *plain):
            patches.enter_context(patch.object(owner, name, value))
        DeviceProperties.create.cache_clear()
        try:
            yield
        finally:
            DeviceProperties.create.cache_clear()


def _properties(device: Any = None) -> _H100:
    return _GPU


def run_without_kernels(source: str, constants: dict[str, Any]) -> SimpleNamespace:
    """Load generated code without its kernels; the module has `call(inputs)` and `runner`, as Inductor's.

    Operations that Inductor leaves to torch run on the given tensors, whatever device the code names.
    """
    names = {**_NAMES, **constants}
    body: list[ast.stmt] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            body.append(statement)
        elif isinstance(statement, ast.ImportFrom):
            names |= {each.name: _nothing for each in statement.names if each.name.startswith("assert_")}
        elif isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            if _makes_kernel(statement.value):
                names[target.id] = _KERNEL
            elif target.id.startswith("assert_"):  # checks of sizes and strides: each torch has its own
                names[target.id] = _nothing
            elif target.id in ("runner", "call"):
                body.append(statement)
    exec(compile(ast.Module(body, type_ignores=[]), FILE_NAME, "exec"), names)
    return SimpleNamespace(call=names["call"], runner=names.get("runner"))


def _makes_kernel(value: ast.expr) -> bool:
    """`async_compile.triton(…)`, and the same for C++."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return isinstance(value.func.value, ast.Name) and value.func.value.id == "async_compile"


class _Kernel:
    """A kernel that does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__


class _Operations:
    """torch.ops, with the operations of symmetric memory as on a GPU."""

    symm_mem = fused_products()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops, name)


class _Torch:
    """torch with a stand-in for the GPU."""

    cuda = SimpleNamespace(_DeviceGuard=nullcontext, set_device=lambda index: None)
    ops = _Operations()

    @staticmethod
    def device(*unused: Any, **named: Any) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _view(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    """The view that Inductor's reinterpret_tensor makes: the offset counts from the tensor's own."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


_KERNEL = _Kernel()
_NAMES = {
    "__name__": "compiled",
    "torch": _Torch(),
    "device": _Torch.device,
    "aten": torch.ops.aten,
    "inductor_ops": torch.ops.inductor,
    "extern_kernels": extern_kernels,
    "empty_strided": torch.empty_strided,
    "empty_strided_cpu": _empty,
    "empty_strided_cuda": _empty,
    "reinterpret_tensor": _view,
    "get_raw_stream": _nothing,
    "inf": float("inf"),
    "nan": float("nan"),
}
