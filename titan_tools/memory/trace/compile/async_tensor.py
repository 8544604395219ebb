"""Asynchronous tensor parallelism within a trace: torch's own fused products, around what only a GPU has.

Inductor's pass puts them in the plan, as in training. What they allocate, torch's Python code for CUDA allocates here:
torch/distributed/_symmetric_memory/__init__.py, alike in torch 2.11 and 2.13. Copies between ranks go through a
workspace in symmetric memory, one for the group and as large as the largest request, outside of torch's allocator.
Half of the pieces are multiplied on a stream of their own, for which both handles of cuBLAS have another workspace.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from converters.errors import UnsupportedError
from titan_tools.memory.constants import CUBLAS_HANDLES, SIGNAL_PAD_BYTES, SYMMETRIC_GRANULE
from titan_tools.memory.trace.kernels.kernels import Kernels, cublas_bytes
from titan_tools.memory.trace.record.recorder import Recorder
from trainer.config.sections import Config

BACKEND_STREAM = "async_tp"
_MOVING = (
    "_pipelined_multi_all_gather_and_consume",
    "_pipelined_all_gather_and_consume_last_dim",
    "_pipelined_produce_and_all2all",
)


@contextmanager
def async_tensor_traced(config: Config, kernels: Kernels, recorder: Recorder) -> Iterator[None]:
    """Within, products are fused with the collectives of the tensor-parallel group, if the config asks for it."""
    degree = config.parallelism.tensor_parallel_degree
    if not config.parallelism.enable_async_tensor_parallel or degree == 1:
        yield
        return
    import torch._inductor.config as inductor
    from torch._inductor.fx_passes import micro_pipeline_tp

    for _ in range(CUBLAS_HANDLES):
        if size := cublas_bytes(kernels):
            recorder.allocate(size, part="workspaces", stream=BACKEND_STREAM)
    with ExitStack() as stack:
        stack.enter_context(inductor.patch(_micro_pipeline_tp=True))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))  # which the pass asks first
        stack.enter_context(patch.object(micro_pipeline_tp.log, "disabled", True))  # on graphs with nothing to fuse
        for name, value in (
            ("torch", _TorchOnAGpu()),
            ("is_symm_mem_enabled_for_group", partial(_are_tensor_parallel, degree)),
            ("make_contiguous_for_perm", partial(_without_memory, symmetric.make_contiguous_for_perm)),
            ("get_symm_mem_workspace", partial(_workspace, recorder)),
            ("_get_backend_stream", lambda priority=0: _Stream()),
            ("_should_use_fused_all_gather_matmul_native", _refuse_few_tokens),
            *((name, partial(_not_recorded, recorder, getattr(symmetric, name))) for name in _MOVING),
        ):
            stack.enter_context(patch.object(symmetric, name, value))
        yield


def fused_products() -> SimpleNamespace:
    """The operations of `torch.ops.symm_mem` that Inductor's pass puts in, as CUDA runs them."""
    names = ("fused_all_gather_matmul", "fused_all_gather_scaled_matmul")
    names += ("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter")
    return SimpleNamespace(**{name: SimpleNamespace(default=_as_on_cuda(f"_{name}")) for name in names})


def _as_on_cuda(name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # slices of scales that are not aligned are copied: blocks begin at multiples of 512
        address = lambda tensor: tensor.storage_offset() * tensor.element_size()  # noqa: E731
        with patch.object(FakeTensor, "data_ptr", address, create=True):
            return getattr(symmetric, name)(*args, **kwargs)

    return run


def _are_tensor_parallel(degree: int, group_name: str) -> bool:
    """Whether a group is this rank's tensor-parallel one, the mesh's innermost axis: the only one that is announced."""
    rank = dist.get_rank()
    first = rank - rank % degree
    group = dist.distributed_c10d._resolve_process_group(group_name)
    return dist.get_process_group_ranks(group) == list(range(first, first + degree))


def _without_memory(restride: Callable[..., Tensor], tensor: Tensor, perm: list[int]) -> Tensor:
    """Only its strides are asked for; a torch without CUDA cannot make a tensor there contiguous."""
    return restride(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), perm)


def _workspace(recorder: Recorder, group_name: str, min_size: int) -> SimpleNamespace:
    """A handle of the workspace, for as much of it as moving asks for."""
    block = SIGNAL_PAD_BYTES + min_size
    trace = recorder.trace
    trace.symmetric_bytes = max(trace.symmetric_bytes, -(-block // SYMMETRIC_GRANULE) * SYMMETRIC_GRANULE)
    group = dist.distributed_c10d._resolve_process_group(group_name)
    return SimpleNamespace(
        rank=group.rank(),
        world_size=group.size(),
        barrier=lambda channel=0: None,
        get_buffer=lambda rank, sizes, dtype, storage_offset=0: torch.empty(sizes, dtype=dtype),
    )


def _not_recorded(recorder: Recorder, move: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """All that moving and multiplying pieces writes to is there before."""
    with recorder.paused():
        move(*args, **kwargs)


def _refuse_few_tokens(A_shard: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str) -> bool:
    """torch has other kernels where what is gathered lies first and is short: none that titan's layers lead to."""
    if gather_dim == 0:
        raise UnsupportedError("asynchronous tensor parallelism over a first dim: not known what it takes on a GPU")
    return False


class _Stream:
    """A stream of the GPU, to wait on and to switch to."""

    def wait_stream(self, other: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *unused: Any) -> None:
        pass


class _TorchOnAGpu:
    """torch, with streams where there are none."""

    cuda = SimpleNamespace(
        current_stream=_Stream,
        _sleep=lambda cycles: None,
        Event=lambda: SimpleNamespace(wait=lambda: None, record=lambda: None),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
