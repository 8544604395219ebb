"""The order of attention kernels by GPU, seen from inside the context; a CPU is left alone."""

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from trainer.parallel.attention_backend import attention_backends

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((8, 0), [FLASH, EFFICIENT, MATH]),
        ((8, 9), [FLASH, EFFICIENT, MATH]),
        ((9, 0), [CUDNN, FLASH, EFFICIENT, MATH]),
        ((10, 0), [FLASH, EFFICIENT, MATH]),
    ],
)
def test_cudnn_is_asked_first_on_hopper_alone(capability, order, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with attention_backends(torch.device("cuda")):
        assert _cur_sdpa_kernel_backends(with_priority=True) == order
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_a_cpu_keeps_what_it_has():
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with attention_backends(torch.device("cpu")):
        assert _cur_sdpa_kernel_backends(with_priority=True) == before
