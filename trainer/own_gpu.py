"""Which GPU is this rank's, as its launcher says."""

import os

import torch

from converters.errors import ConfigError


def own_gpu() -> torch.device:
    """This rank's GPU, by its number on this machine: torchrun's LOCAL_RANK, or what Slurm's srun calls it."""
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    if not number.isdecimal():
        raise ConfigError(
            f"LOCAL_RANK = {number!r} does not say which GPU is this rank's",
            hint="torchrun and `titan train` set it, a launcher of your own has to: 0, 1, … on each machine",
        )
    num_gpus = torch.cuda.device_count()
    if int(number) >= num_gpus:
        raise ConfigError(
            f"rank {number} of this machine has no GPU: torch sees {num_gpus}",
            hint="start no more ranks than GPUs on a machine; srun --gpus-per-task hides all GPUs but the rank's own",
            tries=["srun --gpus-per-node", "CUDA_VISIBLE_DEVICES=, to run on the CPU"],
        )
    return torch.device("cuda", int(number))
