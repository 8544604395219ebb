"""How many ranks there are, and which device is this one's, as the command line and the launcher say."""

import os

import torch

from converters.errors import ConfigError
from titan_tools.launch import inside_launch
from trainer.process_group import own_gpu


def degree(asked: int | None) -> int:
    """The tp degree: what was asked for, which inside a launch must be the launch's size."""
    if not inside_launch():
        return asked or 1
    world_size = int(os.environ["WORLD_SIZE"])
    if asked not in (None, world_size):
        raise ConfigError(
            f"--tp is {asked}, but the launcher started {world_size} ranks",
            tries=[f"--tp {world_size}", f"titan infer … --tp {asked} without torchrun"],
        )
    return world_size


def check_devices(tp: int) -> None:
    """Raise ConfigError where this machine has GPUs, but not one for each of its ranks."""
    # A launcher that does not say how many ranks of its own are here says which one this is; see `own_device`
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if inside_launch() else tp))
    if torch.cuda.is_available() and num_local > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {tp} needs {num_local} GPUs on this machine, which has {torch.cuda.device_count()}",
            tries=["CUDA_VISIBLE_DEVICES= titan infer …, to run on the CPU"],
        )


def own_device(tp: int) -> torch.device:
    """This rank's GPU, made the current one, or the CPU. Raises ConfigError where a launcher does not say which."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))
    device = own_gpu() if tp > 1 else torch.device("cuda", int(number))
    torch.cuda.set_device(device)
    return device
