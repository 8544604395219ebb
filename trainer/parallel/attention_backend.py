"""Which of torch's kernels computes attention: the order in which they are asked whether they can."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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
