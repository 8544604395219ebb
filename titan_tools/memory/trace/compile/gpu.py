"""A GPU that Inductor can write code for where there is none: it asks for a few facts, and starts nothing on it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.scheduler
import torch.utils._triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties


@dataclass(frozen=True, slots=True)
class _Properties:
    """An H100 SXM's (CUDA C++ programming guide, compute capability 9.0). They decide how reductions are split."""

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
    L2_cache_size: int = 50 * 2**20
    total_memory: int = 80 * 2**30
    warp_size: int = 32
    gcnArchName: str = ""


_GPU = _Properties()


@contextmanager
def gpu_described() -> Iterator[None]:
    """Within, Inductor finds a GPU and Triton, whatever is here, as far as writing code for them goes."""
    with ExitStack() as patches:
        for owner, name, value in (
            (CudaInterface, "get_device_properties", _properties),
            (CudaInterface, "get_compute_capability", lambda device=None: _GPU.major * 10 + _GPU.minor),
            (CudaInterface, "is_bf16_supported", lambda including_emulation=False: True),
            (CudaInterface, "current_device", lambda: 0),
            (CudaInterface.Worker, "get_device_properties", _properties),
            (CudaInterface.Worker, "current_device", lambda: 0),
        ):
            patches.enter_context(patch.object(owner, name, staticmethod(value)))
        for owner, name, value in (
            (torch.cuda, "get_device_properties", _properties),
            (torch.cuda, "get_device_capability", lambda device=None: (_GPU.major, _GPU.minor)),
            (torch.cuda, "current_device", lambda: 0),
            (torch._inductor.scheduler, "has_triton", lambda: True),
            (torch.utils._triton, "triton_hash_with_backend", lambda: ""),  # names a cache that nothing is put into
        ):
            patches.enter_context(patch.object(owner, name, value))
        DeviceProperties.create.cache_clear()
        try:
            yield
        finally:
            DeviceProperties.create.cache_clear()


def _properties(device: Any = None) -> _Properties:
    return _GPU
