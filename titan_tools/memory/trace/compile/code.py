"""Runs the code that Inductor writes, without its kernels: what is allocated, handed on and let go of stays."""

import ast
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.select_algorithm import extern_kernels

FILE_NAME = "<Inductor's code>"  # as tracebacks name it


def run_without_kernels(source: str, constants: dict[str, Any]) -> SimpleNamespace:
    """The module that Inductor has written, as far as calling it goes: `call(inputs)` and `runner`, as it has them.

    Operations that it leaves to torch run on the tensors at hand, whose device is taken for the one in the code.
    """
    names = {**_NAMES, **constants}
    body = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            body.append(statement)
        elif isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            if _makes_kernel(statement.value):
                names[target.id] = _KERNEL
            elif target.id in ("runner", "call"):
                body.append(statement)
    exec(compile(ast.Module(body, type_ignores=[]), FILE_NAME, "exec"), names)
    return SimpleNamespace(call=names["call"], runner=names.get("runner"))


def _makes_kernel(value: ast.expr) -> bool:
    """`async_compile.triton(…)` and its like for C++."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return isinstance(value.func.value, ast.Name) and value.func.value.id == "async_compile"


class _Kernel:
    """Writes into what it is given, and here not even that."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__


class _Device:
    """For the code's `with`; nothing is started on it."""

    def __init__(self, index: int):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *unused: Any) -> None:
        pass


class _Torch:
    """torch, but without a GPU to go to."""

    cuda = SimpleNamespace(_DeviceGuard=_Device, set_device=lambda index: None)

    @cached_property
    def ops(self) -> Any:
        return _Operations()

    @staticmethod
    def device(*unused: Any, **named: Any) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Operations:
    """torch.ops, but those of symmetric memory as a GPU runs them."""

    @cached_property
    def symm_mem(self) -> SimpleNamespace:
        from titan_tools.memory.trace.compile.async_tensor import fused_products

        return fused_products()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops, name)


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _view(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    """As torch's own: the offset counts from the tensor's."""
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
    "assert_size_stride": _nothing,
    "assert_alignment": _nothing,
    "get_raw_stream": _nothing,
    "inf": float("inf"),
    "nan": float("nan"),
}
