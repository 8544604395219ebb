"""Asynchronous tensor parallelism: the compiler splits products and overlaps their communication with computation.

torch is imported inside functions, so that settings are checked without it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from trainer.config.sections import Compile, Parallelism
from trainer.parallel.compile import compiles
from trainer.ranks.machine import Device

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "parallelism.enable_async_tensor_parallel"


def async_tensor_problems(parallelism: Parallelism, compile: Compile, *, tp: int) -> list[str]:
    """Settings that asynchronous tensor parallelism needs and the config does not have."""
    if not parallelism.enable_async_tensor_parallel:
        return []
    problems = []
    if tp == 1:
        problems.append(
            f"{_KEY}: tensor_parallel_degree is 1, so nothing is communicated; nearest: a degree of 2, or false"
        )
    if not compiles(compile, "model"):
        problems.append(f"{_KEY} is done by the compiler, and the model is not compiled; nearest: --compile.enable")
    elif compile.backend != "inductor":
        problems.append(
            f"{_KEY} needs compile.backend inductor, not {compile.backend}; nearest: --compile.backend inductor"
        )
    return problems


def async_tensor_machine_problems(parallelism: Parallelism, device: Device) -> list[str]:
    """Asynchronous tensor parallelism copies between GPUs."""
    if parallelism.enable_async_tensor_parallel and device.type != "cuda":
        return [f"{_KEY} copies between GPUs, and this device is {device.type}; nearest: false"]
    return []


def enable_async_tp(group: dist.ProcessGroup) -> None:
    """Enable the compiler's pass for the tensor-parallel group, in this process. Call it before anything compiles."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # The call is deprecated, but the pass still ignores groups that were not enabled this way.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
