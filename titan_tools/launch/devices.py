"""The GPUs of this machine, counted without torch if there are none."""

import os
from pathlib import Path

from trainer.ranks.machine import HOST_CPU, Device

_GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")  # NVIDIA; AMD; Windows' GPUs under WSL


def count_gpus() -> int:
    """Number of GPUs that torch can use on this machine; respects CUDA_VISIBLE_DEVICES."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if is_hidden or not any(path for pattern in _GPU_DEVICES for path in Path("/dev").glob(pattern)):
        return 0  # without importing torch, which takes seconds
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str:
    """The name of this machine's first GPU, without a context on it, which would take its memory."""
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        for line in file.read_text().splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return "GPUs"


def find_device() -> Device | None:
    """The device of ranks on this machine; None if torch is missing, without which GPUs cannot be counted."""
    try:
        if not count_gpus():
            return HOST_CPU
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    import torch

    return torch.device("cuda")
