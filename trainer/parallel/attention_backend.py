"""The order of attention kernels, and the dtype of attention on a CPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from converters.families.args import DecoderArgs
from trainer.models.attention import CausalAttention
from trainer.models.units import ModelPart, blocks_of
from trainer.parallel.document_attention import PerDocumentAttention
from trainer.parallel.masked_attention import OneOfMasks

_HOPPER = 9
_ELSEWHERE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_backends(device: torch.device) -> AbstractContextManager[Any]:
    """Context that sets the order of attention kernels: on Hopper cuDNN first, the fastest there. No effect on a CPU.

    cuDNN is not used on Blackwell, where it may be wrong for fewer than 8 KV heads (pytorch#193893), as under TP.

    Backward must run inside it too, so that recomputation uses the same kernel.
    """
    if device.type != "cuda":
        return nullcontext()
    order = _ELSEWHERE
    if torch.cuda.get_device_capability(device)[0] == _HOPPER:
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    return sdpa_kernel(order, set_priority=True)


def selects_cudnn(args: DecoderArgs, dtype: torch.dtype, device: torch.device, *, value_dim: int | None = None) -> bool:
    """Whether torch's attention runs cuDNN's kernel for causal attention of a model in this dtype on this device.

    `value_dim`: features of a head of v, if they are not those of q.
    """
    if device.type != "cuda":
        return False
    with attention_backends(device):
        q, k, v = (
            torch.empty(1, heads, 128, width, dtype=dtype, device=device, requires_grad=True)
            for heads, width in (
                (args.num_heads, args.head_dim),
                (args.num_kv_heads, args.head_dim),
                (args.num_kv_heads, value_dim or args.head_dim),
            )
        )
        grouped = args.num_heads != args.num_kv_heads
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped))
    return chosen == SDPBackend.CUDNN_ATTENTION


class WideAttention(nn.Module):
    """Runs an inner attention in fp32, for inputs and outputs of any dtype."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, scale: float | None = None, **others: Any
    ) -> Tensor:
        out_BLNH: Tensor = self.inner(q_BLNH.float(), k_BLKH.float(), v_BLKH.float(), scale=scale, **others)
        return out_BLNH.type_as(q_BLNH)


def widen_attention_on_cpu(parts: Sequence[ModelPart], device: torch.device) -> None:
    """Compute causal attention in fp32 on a CPU, where torch's bf16 backward is three times slower.

    Not part of `build`: estimates and dry runs build on a CPU what will run on a GPU.
    """
    if device.type != "cpu":
        return
    for part in parts:
        for _, layer, *_ in blocks_of(part):
            holder: Any = getattr(layer, "attention", None)
            name = "inner_attention"
            inner = getattr(holder, name, None)
            if isinstance(inner, OneOfMasks):
                holder, name, inner = inner, "attend", inner.attend
            if type(inner) is CausalAttention or type(inner) is PerDocumentAttention:
                setattr(holder, name, WideAttention(inner))
