"""Run a rank of torchtitan 0.2.2 without CUDA, for train.py: `torchrun … torchtitan_on_cpu.py --job.config_file FILE`.

torchtitan takes "cuda" if it finds no accelerator. Here it gets torch.cpu, with the functions that it calls on a
device module. Model, parallelism, optimizer and loop are its own.
"""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def device_module() -> ModuleType:
    """torch.cpu with the functions of torch.cuda that torchtitan calls; memory statistics are empty."""
    total_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    missing: dict[str, Any] = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=total_memory),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
    }
    for name, function in missing.items():
        setattr(torch.cpu, name, function)
    return torch.cpu


def main() -> None:
    module = device_module()
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: module
    os.environ["LOCAL_RANK"] = "0"  # every rank's device is "cpu:0"
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    init_logger()
    trainer = Trainer(ConfigManager().parse_args(sys.argv[1:]))
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
