"""Which of torch's kernels computes attention: the order in which they are asked, and the dtype on a CPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.models.llama3.model import CausalAttention

_HOPPER = 9
_ELSEWHERE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_backends(device: torch.device) -> AbstractContextManager:
    """The order for all attention inside: cuDNN's first on Hopper, where it is the fastest; a CPU has no choice.

    Not on Blackwell, where cuDNN's may be wrong for fewer than 8 KV heads (pytorch#193893), which TP makes of more.

    Backward must be inside too: what is computed again there must be computed alike. A context rank's attention asks in
    the same order, but for queries that are fewer than their keys torch goes to flash itself: cuDNN has no such mask.
    """
    if device.type != "cuda":
        return nullcontext()
    order = _ELSEWHERE
    if torch.cuda.get_device_capability(device)[0] == _HOPPER:
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    return sdpa_kernel(order, set_priority=True)


class WideAttention(nn.Module):
    """The attention seam in fp32, whatever dtype comes and goes."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
        return self.inner(q_BLNH.float(), k_BLKH.float(), v_BLKH.float()).type_as(q_BLNH)


def widen_attention_on_cpu(parts: Sequence[nn.Module], device: torch.device) -> None:
    """On a CPU compute causal attention in fp32: torch's backward in bf16 takes three times as long there.

    Not at build: estimates and dry runs build on a CPU what will run on a GPU.
    """
    if device.type != "cpu":
        return
    for part in parts:
        for layer in part.layers.values():
            seam = getattr(getattr(layer, "attention", None), "inner_attention", None)
            if type(seam) is CausalAttention:
                layer.attention.inner_attention = WideAttention(seam)
