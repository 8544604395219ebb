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
    """A copy of torch.cpu with the functions of torch.cuda that torchtitan calls; memory statistics are empty."""
    total_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    module = ModuleType("cpu_as_cuda")
    added: dict[str, Any] = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=total_memory),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
    }
    vars(module).update(vars(torch.cpu) | added)
    return module


def main() -> None:
    module = device_module()
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: module
    os.environ["LOCAL_RANK"] = "0"  # every rank's device is "cpu:0"
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import utils
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    utils.set_pg_timeouts = lambda **_: None  # its barrier names a CUDA device

    def divide(module: FSDPModule, factor: float) -> None:  # gloo has no scaled sums
        module.set_force_sum_reduction_for_comms(True)
        set_factor(module, factor)

    set_factor, FSDPModule.set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor, divide
    init_logger()
    trainer = Trainer(ConfigManager().parse_args(sys.argv[1:]))
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
