"""What CUDA kernels allocate inside of themselves, where that is more than a mebibyte: no dispatch shows it.

Written down from ATen's sources, torch 2.11 to 2.13; each function names its file. Of what a step of titan runs, others
need nothing (products beyond cuBLAS's workspace, softmax, gather, complex multiplication), or kilobytes: FSDP's
`chunk_cat` and `split_with_sizes_copy` send tables of 8 bytes per 2 KiB of a shard (native/cuda/TensorShape.cu).
"""

from collections.abc import Callable
from math import ceil, prod
from typing import Any

import torch

from titan_tools.memory.constants import EMBEDDING_ROWS_PER_THREAD, EMBEDDING_UNSORTED_TOKENS

aten = torch.ops.aten

OwnBuffers = Callable[[tuple], int]  # an operation's inputs → bytes

_FOREACH_CHUNK = 65536  # elements: kChunkSize, native/cuda/MultiTensorApply.cuh


def embedding_backward_bytes(args: tuple) -> int:
    """Indices sorted by token, and room for a row in fp32 for each run of up to ten that are alike.

    native/cuda/Embedding.cu (sorted_indices, orig_indices) and EmbeddingBackwardKernel.cu (segment_offsets,
    partials_per_segment and its sums, partial_segment_offset, grad_weight_per_segment).
    """
    gradient, indices, num_weights = args[:3]
    count = indices.numel()
    if count <= EMBEDDING_UNSORTED_TOKENS:
        return 0
    num_segments = min(count, num_weights)
    num_partial = count // EMBEDDING_ROWS_PER_THREAD + num_segments
    index_bytes = indices.element_size() * (3 * count + 2 * num_segments + num_partial)
    return index_bytes + num_partial * gradient.shape[-1] * max(gradient.element_size(), 4)


def foreach_norm_bytes(args: tuple) -> int:
    """A number per chunk for every tensor, as many as the largest one has chunks; fp32 at least.

    native/cuda/ForeachReduceOp.cu (output_per_tensor).
    """
    tensors = args[0]
    most_chunks = max(ceil(tensor.numel() / _FOREACH_CHUNK) for tensor in tensors)
    return len(tensors) * most_chunks * max(tensors[0].element_size(), 4)


def sum_bytes(args: tuple) -> int:
    """Of more than 2 GiB in 16 bits: sums in fp32, as one kernel cannot see it all.

    native/cuda/Reduce.cuh (AccumulationBuffer), where TensorIterator::can_use_32bit_indexing says no.
    """
    tensor, dims = args[:2]
    if tensor.element_size() != 2 or tensor.numel() <= 2**30:
        return 0
    summed = prod(tensor.shape[dim] for dim in (dims or range(tensor.dim())))
    return 4 * (tensor.numel() // summed)


CUDA_BUFFERS: dict[Any, OwnBuffers] = {
    aten.embedding_dense_backward.default: embedding_backward_bytes,
    aten._foreach_norm.Scalar: foreach_norm_bytes,
    aten.sum.dim_IntList: sum_bytes,
}
"""By operation."""
