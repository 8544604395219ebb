"""Which kernels a traced step runs: a CPU's own, or stand-ins with the memory of a GPU's."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import trainer.parallel.context
from titan_tools.memory.constants import HOPPER, MIB, Gpu
from titan_tools.memory.trace.kernels.cuda_buffers import CUDA_BUFFERS, OwnBuffers
from titan_tools.memory.trace.kernels.float8 import float8_as_on_gpu
from titan_tools.memory.trace.kernels.fp32_attention import causal_in_fp32, for_any_dtype, prefix_in_fp32
from titan_tools.memory.trace.kernels.fused_norm import fused_norm
from trainer.optim import clip

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kernels:
    """A device's kernels as far as they move memory. The default is a CPU's, as they are.

    `attention`: what scaled_dot_product_attention is routed to. `norm`: RMSNorm in one kernel that keeps one fp32
    number per token, or in torch's composite form. `cublas_mib`: the workspace of one handle, in MiB.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    attention: Literal["own", "flash", "cudnn"] = "own"
    norm: Literal["own", "fused"] = "own"
    cublas_mib: float = 0.0
    workspaces: Mapping[Any, OwnBuffers] = field(default_factory=dict)


def gpu_kernels(gpu: Gpu) -> Kernels:
    """A GPU type's. As trainer/parallel/attention_backend.py has it: cuDNN's attention on Hopper, flash elsewhere."""
    workspaces = {
        **CUDA_BUFFERS,
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward_bytes,
        aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward_bytes,
    }
    return Kernels("cuda", "cudnn" if gpu.sm == HOPPER else "flash", "fused", gpu.cublas_mib, workspaces)


@contextmanager
def kernels_used(kernels: Kernels) -> Iterator[None]:
    """Within, the step runs these."""
    with ExitStack() as patches:
        if kernels.attention != "own":
            attend = _cudnn_attention if kernels.attention == "cudnn" else _flash_attention
            attend = for_any_dtype(attend, causal_in_fp32)
            attend_to_prefix = for_any_dtype(_attend_to_prefix, prefix_in_fp32)
            patches.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
            patches.enter_context(patch.object(trainer.parallel.context, "attend_to_prefix", attend_to_prefix))
        if kernels.norm == "fused":
            patches.enter_context(fused_norm())
        if kernels.device == "cuda":
            patches.enter_context(patch.object(clip, "_square_sums", clip.square_sums_on_gpu))
            patches.enter_context(float8_as_on_gpu())
        yield


def cublas_bytes(kernels: Kernels) -> int:
    return round(kernels.cublas_mib * MIB)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, *unused: Any, is_causal: bool = False, **others: Any) -> Tensor:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *unused: Any, is_causal: bool = False, **others: Any) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)[0]


def _attend_to_prefix(q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor) -> Tensor:
    """On a GPU torch's description of the mask leads to flash attention, whose causal means lower right."""
    q, k, v = (x.transpose(1, 2) for x in (q_BCNH, k_BEKH, v_BEKH))
    return _flash_attention(q, k, v, is_causal=True).transpose(1, 2)


def _flash_backward_bytes(args: tuple) -> int:
    """FlashAttention 2: dq in fp32 and a row sum, queries by 128 and heads by 32; dk and dv per query head if grouped.

    From csrc/flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d, dk_expanded, dv_expanded.
    """
    _, q, k, v = args[:4]
    batch, heads, length, dim = q.shape
    padded = _rounded(length, 128)
    size = batch * heads * padded * 4 * (_rounded(dim, 32) + 1)
    if heads != k.shape[1]:
        size += 2 * batch * k.shape[2] * heads * dim * k.element_size()
    return size


def _rounded(number: int, multiple: int) -> int:
    return ceil(number / multiple) * multiple


def _cudnn_backward_bytes(args: tuple) -> int:
    """cuDNN's dq in fp32 and a row sum, as in flash attention; its own heads are grouped without copies."""
    _, q, *_ = args
    batch, heads, length, dim = q.shape
    return batch * heads * length * 4 * (dim + 1)
