"""Joining the other ranks: device, process groups, and how long a collective may take."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.gloo import use_one_worker
from trainer.mesh import Meshes
from trainer.own_gpu import own_gpu

# Writing a large checkpoint, or waiting for its slowest rank, takes longer than any step.
CHECKPOINT_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's device, and a gloo group of all ranks for checkpoints and agreements, apart from training traffic."""

    device: torch.device
    agreement: dist.ProcessGroup


def join_ranks(*, init_timeout_secs: int, has_cpu_tensors: bool = False) -> Ranks:
    """Join the process group that the launcher's environment describes: NCCL where there are GPUs, else gloo.

    `has_cpu_tensors`: gloo beside NCCL, for gradients that CPU offload keeps in host memory.
    """
    use_one_worker()
    timeout = timedelta(seconds=init_timeout_secs)
    if torch.cuda.is_available():
        device = own_gpu()
        torch.cuda.set_device(device)
        if has_cpu_tensors:  # bound to no device: meshes split a bound group, and NCCL's part of it only
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
        else:
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    return Ranks(device, dist.new_group(backend="gloo", timeout=CHECKPOINT_TIMEOUT))


def set_train_timeout(meshes: Meshes, secs: int) -> None:
    """From the second step on a collective that takes long hangs: compilation and first connections are behind us."""
    public = hasattr(dist, "set_timeout")  # torch 2.15 has it and warns of the private one; up to 2.13 it is not there
    set_timeout = dist.set_timeout if public else distributed_c10d._set_pg_timeout
    axes = ("pp", "dp_replicate", "fsdp", "tp", "batch", "cp", "loss")
    for group in (None, *(meshes[axis].get_group() for axis in axes)):
        set_timeout(timedelta(seconds=secs), group)


def leave_ranks() -> None:
    """Part from the group after everyone is done, so that no rank sees a peer vanish."""
    dist.barrier()
    dist.destroy_process_group()
