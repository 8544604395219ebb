"""Joining the other ranks: device, process groups, and how long a collective may take."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from trainer.mesh import Meshes

# Writing a large checkpoint, or waiting for its slowest rank, takes longer than any step.
_CHECKPOINT_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's device, and a gloo group of all ranks for checkpoints and agreements, apart from training traffic."""

    device: torch.device
    agreement: dist.ProcessGroup


def join_ranks(*, init_timeout_secs: int) -> Ranks:
    """Join the process group that the launcher's environment describes: NCCL where there are GPUs, else gloo."""
    timeout = timedelta(seconds=init_timeout_secs)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    return Ranks(device, dist.new_group(backend="gloo", timeout=_CHECKPOINT_TIMEOUT))


def set_train_timeout(meshes: Meshes, secs: int) -> None:
    """From the second step on a collective that takes long hangs: compilation and first connections are behind us."""
    axes = ("pp", "dp_replicate", "fsdp", "tp", "batch", "cp", "loss")
    for group in (None, *(meshes[axis].get_group() for axis in axes)):
        _set_pg_timeout(timedelta(seconds=secs), group)


def leave_ranks() -> None:
    """Part from the group after everyone is done, so that no rank sees a peer vanish."""
    dist.barrier()
    dist.destroy_process_group()
