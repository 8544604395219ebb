"""Asynchronous tensor parallelism: the compiler cuts products in pieces, and moves one while the next is computed.

torch is imported inside functions: what cannot be combined is checked without it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from trainer.config.sections import Compile, Parallelism
from trainer.parallel.compile import compiles

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_KEY = "parallelism.enable_async_tensor_parallel"


def async_tensor_problems(parallelism: Parallelism, compile: Compile, *, tp: int) -> list[str]:
    """Settings that asynchronous tensor parallelism needs and the config does not have."""
    if not parallelism.enable_async_tensor_parallel:
        return []
    problems = []
    if tp == 1:
        problems.append(f"{_KEY}: tensor_parallel_degree is 1, so nothing is moved; nearest: a degree of 2, or without")
    if not compiles(compile, "model"):
        problems.append(f"{_KEY} is the compiler's work, and the model is not compiled; nearest: --compile.enable")
    elif compile.backend != "inductor":
        problems.append(
            f"{_KEY} is the work of compile.backend inductor, not of {compile.backend};"
            " nearest: --compile.backend inductor"
        )
    return problems


def async_tensor_machine_problems(parallelism: Parallelism, device: torch.device) -> list[str]:
    """Asynchronous tensor parallelism copies between GPUs."""
    if parallelism.enable_async_tensor_parallel and device.type != "cuda":
        return [f"{_KEY} moves data between GPUs' memories, and this is {device.type}; nearest: without it"]
    return []


def enable_async_tp(group: dist.ProcessGroup) -> None:
    """Switch the compiler's pass on for the tensor-parallel group, in this whole process. Before anything compiles."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # It calls itself needless, but the pass still leaves alone every group that was not announced so.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
