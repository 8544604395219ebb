"""Attention in fp32 as CUDA computes it: neither flash attention nor cuDNN's takes it.

Which kernel does is ATen's choice, native/transformers/cuda/sdp_utils.cpp: the memory-efficient one, which has no
grouped queries; for those torch's plain products, which keep all scores.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

aten = torch.ops.aten

Attend = Callable[..., Tensor]


def for_any_dtype(attend: Attend, attend_in_fp32: Attend) -> Attend:
    """`attend` for what its kernel takes, the other for fp32."""

    def attend_in_its_dtype(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (attend_in_fp32 if q.dtype == torch.float32 else attend)(q, *args, **kwargs)

    return attend_in_its_dtype


def causal_in_fp32(q: Tensor, k: Tensor, v: Tensor, *unused: Any, is_causal: bool = False, **others: Any) -> Tensor:
    """In place of scaled_dot_product_attention."""
    if q.shape[1] != k.shape[1]:
        return aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, is_causal, enable_gqa=True)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, q.requires_grad, 0.0, is_causal)[0]


def prefix_in_fp32(q_BCNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor) -> Tensor:
    """In place of trainer/parallel/context.py's `attend_to_prefix`; torch/nn/attention/bias.py, CausalBias."""
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
        return causal_in_fp32(q, k, v, is_causal=True).transpose(1, 2)
    mask_CE = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    bias_CE = torch.zeros_like(mask_CE, dtype=q.dtype).masked_fill_(mask_CE.logical_not(), float("-inf"))
    return aten._scaled_dot_product_attention_math(q, k, v, bias_CE, 0.0, False, enable_gqa=True)[0].transpose(1, 2)
