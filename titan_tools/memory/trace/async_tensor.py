"""Asynchronous tensor parallelism in a trace: torch's own fused products, with stand-ins for what only a GPU has.

Inductor's pass puts the fused products into the plan, as in training. What they allocate, torch's Python code for CUDA
allocates here: torch/distributed/_symmetric_memory/__init__.py, alike in torch 2.11 and 2.13. Copies between ranks use
a workspace in symmetric memory, one for the group and as large as the largest request, outside of torch's allocator.
Half of the pieces are multiplied on a second stream, for which both cuBLAS handles have another workspace.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._inductor.fx_passes import micro_pipeline_tp
from torch._subclasses.fake_tensor import FakeTensor

from converters.common.errors import UnsupportedError
from converters.common.sizes import MIB
from titan_tools.memory.trace.kernels import CUBLAS_HANDLES, Kernels, cublas_bytes
from titan_tools.memory.trace.recorder import Recorder
from trainer.config.sections import Config

BACKEND_STREAM = "async_tp"
# A signal pad before or after the requested bytes (CUDASymmetricMemoryTypes.hpp: 32 channels, 72 peers, 4 bytes), the
# total rounded up to the driver's granularity (CUDASymmetricMemory.cu), 2 MiB on NVIDIA's GPUs; torch 2.11 to 2.13, its
# own CUDA backend.
SIGNAL_PAD_BYTES = 32 * 72 * 4
SYMMETRIC_GRANULE = 2 * MIB
MOST_MULTICAST_ROWS = 2048
NATIVE_PRODUCT = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"
_PIPELINED = (
    "_pipelined_multi_all_gather_and_consume",
    "_pipelined_all_gather_and_consume_last_dim",
    "_pipelined_produce_and_all2all",
)


@contextmanager
def trace_async_tp(config: Config, kernels: Kernels, recorder: Recorder) -> Iterator[None]:
    """Fuse products with the collectives of the tensor-parallel group, if the config asks for it."""
    degree = config.parallelism.tensor_parallel_degree
    if not config.parallelism.enable_async_tensor_parallel or degree == 1:
        yield
        return
    for _ in range(CUBLAS_HANDLES):
        if size := cublas_bytes(kernels):
            recorder.allocate(size, part="workspaces", stream=BACKEND_STREAM)
    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(_micro_pipeline_tp=True))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))  # the pass asks for it
        stack.enter_context(patch.object(micro_pipeline_tp.log, "disabled", True))  # warns of graphs with none to fuse
        for name, value in (
            ("torch", _TorchWithStreams()),
            ("is_symm_mem_enabled_for_group", partial(_is_tp_group, degree)),
            ("make_contiguous_for_perm", partial(_restride_on_meta, symmetric.make_contiguous_for_perm)),
            ("get_symm_mem_workspace", partial(_workspace, recorder)),
            ("_get_backend_stream", lambda priority=0: _Stream()),
            ("_should_use_fused_all_gather_matmul_native", _reject_native_product),
            ("_should_use_multimem_all_gather_matmul", partial(_is_multicast, kernels)),
            ("_multimem_all_gather_matmul", partial(_multiply_multicast, recorder)),
            *((name, partial(_without_recording, recorder, getattr(symmetric, name))) for name in _PIPELINED),
        ):
            stack.enter_context(patch.object(symmetric, name, value))
        yield


def fused_products() -> SimpleNamespace:
    """The operations of `torch.ops.symm_mem` that Inductor's pass inserts, as CUDA runs them."""
    names = ["fused_all_gather_matmul", "fused_all_gather_scaled_matmul"]
    names += ["fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter"]
    return SimpleNamespace(**{name: SimpleNamespace(default=_as_on_cuda(f"_{name}")) for name in names})


def _as_on_cuda(name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Slices of scales that are not aligned are copied; blocks begin at multiples of 512
        address = lambda tensor: tensor.storage_offset() * tensor.element_size()  # noqa: E731
        with patch.object(FakeTensor, "data_ptr", address, create=True):
            return getattr(symmetric, name)(*args, **kwargs)

    return run


def _is_tp_group(degree: int, group_name: Any) -> bool:
    """Whether a group is this rank's tensor-parallel one (the innermost axis): only that one is enabled."""
    rank = dist.get_rank()
    first = rank - rank % degree
    group = _resolve_process_group(group_name)
    return dist.get_process_group_ranks(group) == list(range(first, first + degree))


def _restride_on_meta(restride: Callable[..., Tensor], tensor: Tensor, perm: list[int]) -> Tensor:
    """Only the strides are needed; a torch without CUDA cannot make a CUDA tensor contiguous."""
    return restride(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), perm)


def _workspace(recorder: Recorder, group_name: Any, min_size: int) -> SimpleNamespace:
    """A handle of the group's workspace, with what the fused products use of it."""
    block = SIGNAL_PAD_BYTES + min_size
    trace = recorder.trace
    trace.symmetric_bytes = max(trace.symmetric_bytes, -(-block // SYMMETRIC_GRANULE) * SYMMETRIC_GRANULE)
    group = _resolve_process_group(group_name)
    return SimpleNamespace(
        rank=group.rank(),
        world_size=group.size(),
        barrier=lambda channel=0: None,
        get_buffer=lambda rank, sizes, dtype, storage_offset=0: torch.empty(sizes, dtype=dtype),
    )


def _without_recording(recorder: Recorder, move: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Moving and multiplying pieces writes only to tensors that exist already."""
    with recorder.paused():
        move(*args, **kwargs)


def _reject_native_product(A_shard: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str) -> bool:
    """torch has an experimental kernel for gathers over the first dim, which an environment variable switches on."""
    if NATIVE_PRODUCT in os.environ:
        raise UnsupportedError(f"no estimate is given with {NATIVE_PRODUCT}: the memory of its kernel is not known")
    return False


def _is_multicast(kernels: Kernels, A_shard: Tensor, gather_dim: int, group_name: Any, return_A: bool) -> bool:
    """Whether torch gathers by multicast: a short gather over the first dim, such as of an expert layer's tokens."""
    num_rows = math.prod(A_shard.shape[:-1]) * _resolve_process_group(group_name).size()
    is_short = gather_dim == 0 and num_rows <= MOST_MULTICAST_ROWS and A_shard.is_contiguous()
    return kernels.multicast and is_short and not return_A


def _multiply_multicast(recorder: Recorder, A_shard: Tensor, Bs: list[Tensor], group_name: Any) -> list[Tensor]:
    """The products as torch's multicast makes them: the group's workspace takes the whole gathered tensor."""
    shape = (A_shard.shape[0] * _resolve_process_group(group_name).size(), *A_shard.shape[1:])
    workspace = symmetric.get_symm_mem_workspace(group_name, math.prod(shape) * A_shard.element_size())
    with recorder.paused():
        A = workspace.get_buffer(workspace.rank, shape, A_shard.dtype)
    return [torch.matmul(A, B) for B in Bs]


class _Stream(nullcontext[None]):
    """A stand-in for a GPU's stream."""

    def wait_stream(self, other: Any) -> None:
        pass


class _TorchWithStreams:
    """torch, with stand-ins for CUDA's streams."""

    accelerator = SimpleNamespace(current_stream=_Stream)  # from 2.15 on
    cuda = SimpleNamespace(
        current_stream=_Stream,
        is_available=lambda: True,
        _sleep=lambda cycles: None,
        Event=lambda: SimpleNamespace(wait=lambda: None, record=lambda: None),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
