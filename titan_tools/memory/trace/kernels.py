"""The kernels of a traced step: a CPU's own, or stand-ins that allocate what a GPU's kernels allocate.

A stand-in returns tensors of the right shapes. What CUDA kernels allocate internally, where it is more than a mebibyte,
is not visible to dispatch: it is written down here from ATen's sources, torch 2.11 to 2.13, each function naming its
file. Other operations of a step need nothing (products beyond cuBLAS's workspace, softmax, gather), or kilobytes:
FSDP's `chunk_cat` and `split_with_sizes_copy` send tables of 8 bytes per 2 KiB of a shard (native/cuda/TensorShape.cu),
grouped products addresses and sizes of each group (native/cuda/GroupMM.cu).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.attention.bias import CausalVariant

import trainer.models.attention
import trainer.parallel.context
import trainer.parallel.document_attention
import trainer.parallel.expert_exchange
from converters.common.sizes import MIB
from trainer.job.record import Job
from trainer.models.attention import first_features, to_one_width
from trainer.parallel.context import attend_with_cudnn, cudnn_may_give_nan
from trainer.parallel.document_attention import PerDocumentAttention
from trainer.parallel.document_mask import attention_kernel
from trainer.ranks.gpus import HOPPER, WORKSTATION_BLACKWELL, Gpu
from trainer.ranks.mesh import local_part

aten: Any = torch.ops.aten

KernelBuffers = Callable[[tuple[Any, ...]], Any]  # an operation's inputs → bytes that its kernel allocates internally

# Forward runs in the main thread, backward in autograd's: each has a cuBLAS handle of its own, with its own workspace.
CUBLAS_HANDLES = 2
DOCUMENT_TOKENS = 512  # of a mean document; each takes 2 MiB in varlen's backward, for 32 heads of 128
# An embedding's backward, ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, torch 2.11 to 2.13: up to this
# many tokens need no sorting; of more, runs of this many rows for one token are summed separately.
_UNSORTED_TOKENS = 3072
_ROWS_PER_THREAD = 10
_SMALL_SORT = 4096  # numbers: should_use_small_sort, native/cuda/Sort.cu
_FOREACH_CHUNK = 65536  # elements: kChunkSize, native/cuda/MultiTensorApply.cuh


@dataclass(frozen=True, slots=True)
class Kernels:
    """A device's kernels as far as they affect memory, and what they compute. The default is the CPU's own.

    `attention`: the operation that scaled_dot_product_attention prefers. `norm`: RMSNorm in one kernel that keeps one
    fp32 number per token, or in torch's composite form. `cublas_mib`: the workspace of one handle, in MiB. `imbalance`:
    with expert parallelism, the rows that this rank's experts receive over the mean of all ranks. `documents`: the
    kernel of attention within documents. `multicast`: whether a GPU can write to all GPUs of its NVSwitch at once.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    attention: Literal["own", "flash", "cudnn"] = "own"
    norm: Literal["own", "fused"] = "own"
    cublas_mib: float = 0.0
    workspaces: Mapping[Any, KernelBuffers] = field(default_factory=dict)
    imbalance: float = 1.0
    documents: Literal["own", "flex", "varlen"] = "own"
    multicast: bool = False


def gpu_kernels(gpu: Gpu) -> Kernels:
    """A GPU type's kernels; as in trainer/parallel/attention_backend.py cuDNN's attention on Hopper, else flash."""
    workspaces = {
        aten.embedding_dense_backward.default: embedding_backward_bytes,
        aten._foreach_norm.Scalar: foreach_norm_bytes,
        aten.sum.dim_IntList: sum_bytes,
        aten.sort.stable: sort_bytes,
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward_bytes,
        aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward_bytes,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward_bytes,
        torch.ops.titan.send_to_experts.default: send_bytes,
        torch.ops.titan.return_from_experts.default: return_bytes,
    }
    attention: Literal["cudnn", "flash"] = "cudnn" if gpu.sm == HOPPER else "flash"
    multicast = HOPPER <= gpu.sm < WORKSTATION_BLACKWELL and not gpu.is_amd
    return Kernels("cuda", attention, "fused", gpu.cublas_mib, workspaces, multicast=multicast)


def with_attention_of(kernels: Kernels, job: Job) -> Kernels:
    """The kernels, with those of attention with masks, which a model without them does not use."""
    return with_document_attention(kernels, attention_kernel(job.config, job.family))


def with_document_attention(kernels: Kernels, kernel: str) -> Kernels:
    """The kernels of attention within documents too: `flex` or `varlen`.

    What they take, return and keep is that of titan's own operation; only what they hold within themselves differs.
    """
    backward = torch.ops.titan.attend_within_documents_backward.default
    if kernels.device == "cpu":
        return kernels
    is_varlen = kernel == "varlen"
    num_bytes = _varlen_backward_bytes if is_varlen else _flex_backward_bytes
    workspaces = {**kernels.workspaces, backward: num_bytes}
    return replace(kernels, documents="varlen" if is_varlen else "flex", workspaces=workspaces)


@contextmanager
def use_kernels(kernels: Kernels) -> Iterator[None]:
    """Run the step with these kernels."""
    with ExitStack() as patches:
        if kernels.attention != "own":
            attend = _preferring(kernels.attention, _attend)
            attend_to_prefix = _preferring(kernels.attention, _attend_to_prefix)
            patches.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
            patches.enter_context(patch.object(trainer.parallel.context, "attend_to_prefix", attend_to_prefix))
            # Only a CPU has no kernel for values of another width
            patches.enter_context(patch.object(trainer.models.attention, "to_one_width", _as_they_are))
        if kernels.documents == "flex":
            patches.enter_context(patch.object(trainer.parallel.document_attention, "to_one_width", _as_they_are))
            patches.enter_context(patch.object(PerDocumentAttention, "forward", _attend_as_flex))
        if kernels.norm == "fused":
            patches.enter_context(patch.object(F, "rms_norm", _rms_norm))
        yield


def cublas_bytes(kernels: Kernels) -> int:
    return round(kernels.cublas_mib * MIB)


# --- attention


def fused_attention(preferred: str, width: int, value_width: int) -> str:
    """The operation that ATen chooses in 16 bits for heads of these widths of q and of v.

    `preferred`: `cudnn` on Hopper, else `flash`, which takes one width. cuDNN's takes others up to 128, and DeepSeek's
    192 and 128 (from 9.11 on); the memory-efficient kernel takes multiples of 8. native/transformers/cuda/sdp_utils.cpp
    """
    if width == value_width:
        return preferred
    if width % 8 or value_width % 8:
        return "math"
    is_cudnns = max(width, value_width) <= 128 or (width, value_width) == (192, 128)
    return "cudnn" if preferred == "cudnn" and is_cudnns else "efficient"


def _preferring(preferred: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """A function, not a partial: Dynamo asks for its name."""

    def attend_so(*args: Any, **kwargs: Any) -> Any:
        return attend(preferred, *args, **kwargs)

    return attend_so


def _attend(
    preferred: str, q: Tensor, k: Tensor, v: Tensor, *unused: Any, is_causal: bool = False, **others: Any
) -> Any:
    """scaled_dot_product_attention on a GPU. The values of its results are not used, nor is their scale."""
    if q.dtype == torch.float32:
        return _attend_in_fp32(q, k, v, is_causal=is_causal)
    chosen = fused_attention(preferred, q.shape[-1], v.shape[-1])
    if chosen == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    if chosen == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)[0]
    if chosen == "efficient":
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, q.requires_grad, 0.0, is_causal)[0]
    grouped = q.shape[1] != k.shape[1]
    return aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, is_causal, enable_gqa=grouped)[0]


def _attend_to_prefix(
    preferred: str, q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, scale: float | None = None
) -> Any:
    """trainer/parallel/context.py's attention of a context rank on a GPU; values get the keys' width, but for cuDNN.

    torch's CausalBias leads to flash attention, whose causal mask is aligned to the lower right.
    """
    is_wide = q_BCNH.dtype == torch.float32
    is_cudnns = not is_wide and fused_attention(preferred, q_BCNH.shape[-1], v_BEKH.shape[-1]) == "cudnn"
    if is_cudnns and not cudnn_may_give_nan(k_BEKH.shape[1] - q_BCNH.shape[1]):
        return attend_with_cudnn(q_BCNH, k_BEKH, v_BEKH, scale)
    q, k, v = to_one_width(q_BCNH, k_BEKH, v_BEKH)
    if is_wide:
        out = _attend_to_prefix_in_fp32(q, k, v)
    else:
        out = _attend("flash", q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)
    return first_features(out, v_BEKH.shape[-1])


def _attend_as_flex(
    module: PerDocumentAttention,
    q_BCNH: Tensor,
    k_BEKH: Tensor,
    v_BEKH: Tensor,
    mask: Tensor,
    scale: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """trainer/parallel/gpu_attention.py's, whose result sinks scale in an operation of their own: both are kept."""
    attend = torch.ops.titan.attend_within_documents
    out_BCNH: Tensor
    out_BCNH, sums_BNC = attend(q_BCNH, k_BEKH, v_BEKH, mask, None, module.window, scale)
    if sinks_N is None:
        return out_BCNH
    shares_BNC1 = (sums_BNC - sinks_N.float().unsqueeze(1)).sigmoid().unsqueeze(-1)
    scaled_BCNH: Tensor = out_BCNH * shares_BNC1.transpose(1, 2).type_as(out_BCNH)
    return scaled_BCNH


def _as_they_are(*tensors: Tensor) -> list[Tensor]:
    return list(tensors)


def _attend_in_fp32(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Any:
    """scaled_dot_product_attention in fp32, which neither flash attention nor cuDNN's supports.

    ATen chooses the memory-efficient kernel, which has no grouped queries; for those it runs plain products, which keep
    all scores (native/transformers/cuda/sdp_utils.cpp).
    """
    if q.shape[1] != k.shape[1]:
        return aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, is_causal, enable_gqa=True)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, q.requires_grad, 0.0, is_causal)[0]


def _attend_to_prefix_in_fp32(q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor) -> Any:
    """trainer/parallel/context.py's `attend_to_prefix` in fp32; torch/nn/attention/bias.py, CausalBias."""
    num_queries, num_keys = q_BCNH.shape[1], k_BEKH.shape[1]
    if q_BCNH.shape[2] == k_BEKH.shape[2]:
        kind = CausalVariant.UPPER_LEFT if num_queries == num_keys else CausalVariant.LOWER_RIGHT
        return aten._efficient_attention_forward(
            *(q_BCNH, k_BEKH, v_BEKH, None, None, None, None, None, 0.0),
            custom_mask_type=int(kind),
            compute_log_sumexp=q_BCNH.requires_grad,
        )[0]
    q, k, v = (x.transpose(1, 2) for x in (q_BCNH, k_BEKH, v_BEKH))
    if num_queries == num_keys:
        return _attend_in_fp32(q, k, v, is_causal=True).transpose(1, 2)
    mask_CE = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    bias_CE = torch.zeros_like(mask_CE, dtype=q.dtype).masked_fill_(mask_CE.logical_not(), float("-inf"))
    return aten._scaled_dot_product_attention_math(q, k, v, bias_CE, 0.0, False, enable_gqa=True)[0].transpose(1, 2)


def _flash_backward_bytes(args: tuple[Any, ...]) -> int:
    """FlashAttention 2: dq in fp32 and a row sum, queries by 128 and heads by 32; dk and dv per query head if grouped.

    csrc/flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d, dk_expanded, dv_expanded.
    """
    _, q, k, v = args[:4]
    batch, heads, length, dim = q.shape
    padded = _round_up(length, 128)
    size: int = batch * heads * padded * 4 * (_round_up(dim, 32) + 1)
    if heads != k.shape[1]:
        size += 2 * batch * k.shape[2] * heads * dim * k.element_size()
    return size


def _cudnn_backward_bytes(args: tuple[Any, ...]) -> int:
    """cuDNN's dq in fp32 and a row sum, as in flash attention; it groups heads without copies."""
    _, q, *_ = args
    batch, heads, length, dim = q.shape
    num_bytes: int = batch * heads * length * 4 * (dim + 1)
    return num_bytes


def efficient_backward_bytes(args: tuple[Any, ...]) -> int:
    """dq in fp32 by blocks, a number per query, and dk and dv of the block at hand where they do not fit in registers.

    native/transformers/cuda/attention_backward.cu (num_splits_key) and mem_eff_attention/kernel_backward.h
    (Params::workspace_size), with the blocks of kernels/generate_kernels.py for compute capability 8.0 and above.
    """
    _, q, k, v = args[:4]
    batch, heads, length, width = q.shape
    num_keys, value_width = k.shape[2], v.shape[3]
    widest, is_half = max(width, value_width), q.element_size() == 2
    rows = 64 if widest <= 64 else 128  # kBlockSizeI
    fits = is_half and widest <= rows  # kOutputInRF
    columns = 128 if fits and widest > 64 else 64  # kBlockSizeJ
    size = length + ceil(length / rows) * ceil(width / columns) * (rows * columns + 4)
    if is_half and not fits:
        num_splits = max(min(ceil(num_keys / columns), 200 // (batch * heads)), 1)
        size += num_splits * columns * (_round_up(width, rows) + _round_up(value_width, rows))
    num_bytes: int = 4 * batch * heads * size
    return num_bytes


def _varlen_backward_bytes(args: tuple[Any, ...]) -> int:
    """FlashAttention 2 as above, where every document's rows are padded by 128. csrc/flash_attn/flash_api.cpp."""
    _, q, k, *_ = args
    batch, length, heads, dim = q.shape
    num_rows = batch * length + 128 * ceil(batch * length / DOCUMENT_TOKENS)
    size: int = num_rows * heads * 4 * (_round_up(dim, 32) + 1)
    if heads != k.shape[2]:
        size += 2 * k.shape[0] * k.shape[1] * heads * dim * k.element_size()
    return size


def _flex_backward_bytes(args: tuple[Any, ...]) -> int:
    """A row sum in fp32 of the gradient times the output; torch/_inductor/kernel/flex (delta)."""
    _, q, *_ = args
    batch, length, heads, _ = q.shape
    num_bytes: int = batch * length * heads * 4
    return num_bytes


def _round_up(number: int, multiple: int) -> int:
    return ceil(number / multiple) * multiple


# --- RMSNorm


class _FusedRMSNorm(torch.autograd.Function):
    """aten._fused_rms_norm as in derivatives.yaml: keeps the input, the weight if any, and one fp32 number per row.

    On a CPU torch composes RMSNorm of operations that keep fp32 copies. Shapes without values. A DTensor's rows are
    computed locally; each rank's gradient of the weight is a partial sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        own = local_part(x)
        inverse_deviation = own.new_empty((*own.shape[: -len(shape)], *[1] * len(shape)), dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse_deviation)
        return _placed_like(x, torch.empty_like(own))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        grad_x = _placed_like(x, torch.empty_like(local_part(x)))
        if weight is None:
            return grad_x, None, None
        grad_weight = torch.empty_like(local_part(weight))
        if isinstance(weight, DTensor):
            placements = [Partial() if placement.is_shard() else Replicate() for placement in x.placements]
            grad_weight = DTensor.from_local(grad_weight, weight.device_mesh, placements, run_check=False)
        return grad_x, None, grad_weight


def _placed_like(x: Tensor, own: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return own
    return DTensor.from_local(own, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    if torch.compiler.is_compiling():  # a compiler decomposes the operation, and needs to see what it computes
        return torch.ops.aten._fused_rms_norm(x, list(normalized_shape), weight, eps)[0]
    return _FusedRMSNorm.apply(x, list(normalized_shape), weight)  # type: ignore[no-untyped-call]


# --- what kernels allocate internally


def embedding_backward_bytes(args: tuple[Any, ...]) -> int:
    """Indices sorted by token, and a row in fp32 for each run of up to ten equal ones.

    native/cuda/Embedding.cu (sorted_indices, orig_indices) and EmbeddingBackwardKernel.cu (segment_offsets,
    partials_per_segment and its sums, partial_segment_offset, grad_weight_per_segment).
    """
    gradient, indices, num_weights = args[:3]
    count = indices.numel()
    if count <= _UNSORTED_TOKENS:
        return 0
    num_segments = min(count, num_weights)
    num_partial = count // _ROWS_PER_THREAD + num_segments
    index_bytes = indices.element_size() * (3 * count + 2 * num_segments + num_partial)
    num_bytes: int = index_bytes + num_partial * gradient.shape[-1] * max(gradient.element_size(), 4)
    return num_bytes


def foreach_norm_bytes(args: tuple[Any, ...]) -> int:
    """A number per chunk of every tensor, each with as many chunks as the largest; fp32 at least.

    native/cuda/ForeachReduceOp.cu (output_per_tensor).
    """
    tensors = args[0]
    most_chunks = max(ceil(tensor.numel() / _FOREACH_CHUNK) for tensor in tensors)
    num_bytes: int = len(tensors) * most_chunks * max(tensors[0].element_size(), 4)
    return num_bytes


def sort_bytes(args: tuple[Any, ...]) -> int:
    """Temporary bytes of sorting one long row: its positions, and a second copy of all for cub's radix sort.

    native/cuda/SortStable.cu, segmented_sort_large_segments; cub's DispatchRadixSort, where inputs are not overwritten.
    """
    tensor = args[0]
    count: int = tensor.numel()
    return 0 if count <= _SMALL_SORT else count * (2 * 8 + tensor.element_size())


def send_bytes(args: tuple[Any, ...]) -> int:
    """Rows as they arrive, before they are put in the order of experts, and the positions of that order."""
    rows, *_, num_received = args
    num_bytes: int = num_received * (rows.shape[1] * rows.element_size() + 8)
    return num_bytes


def return_bytes(args: tuple[Any, ...]) -> int:
    """Rows in the order in which they go back."""
    num_bytes: int = args[0].numel() * args[0].element_size()
    return num_bytes


def sum_bytes(args: tuple[Any, ...]) -> int:
    """Temporary bytes of a sum of more than 2 GiB in 16 bits: fp32 sums, as one kernel cannot index all of it.

    native/cuda/Reduce.cuh (AccumulationBuffer), where TensorIterator::can_use_32bit_indexing is false.
    """
    tensor, dims = args[:2]
    if tensor.element_size() != 2 or tensor.numel() <= 2**30:
        return 0
    summed: int = prod(tensor.shape[dim] for dim in (dims or range(tensor.dim())))
    num_elements: int = tensor.numel()
    return 4 * (num_elements // summed)
