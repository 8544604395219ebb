"""Which of torch's kernels computes attention: the order in which they are asked whether they can."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_HOPPER = (9, 0)
_BEFORE_HOPPER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_backends(device: torch.device) -> AbstractContextManager:
    """The order for all attention inside: cuDNN's first from Hopper on, where it is the fastest; a CPU has no choice.

    Backward must be inside too: what is computed again there must be computed alike. A context rank's attention asks in
    the same order, but for queries that are fewer than their keys torch goes to flash itself: cuDNN has no such mask.
    """
    if device.type != "cuda":
        return nullcontext()
    order = _BEFORE_HOPPER
    if torch.cuda.get_device_capability(device) >= _HOPPER:
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    return sdpa_kernel(order, set_priority=True)
