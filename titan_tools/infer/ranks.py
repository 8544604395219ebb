"""The ranks of one model: this one's place and device, how they meet, and what the first tells the others."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from converters.errors import ConfigError, TitanError
from titan_tools.launch import inside_launch
from trainer.gloo import use_one_worker

# A rank that is gone shows at once, because its connections close; this is for one that hangs.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
_LOADING_TIMEOUT = timedelta(hours=2)  # until ranks meet: under torchrun the first reads every file for damage
_A_PERSON_TYPES = timedelta(days=30)
# What gloo, NCCL and the store say when a peer is gone, and when it hangs
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Connection refused",
    "Connection was likely closed", "remote process exited", "Failed to recv",
)  # fmt: skip
_HANGS = ("Timed out", "timed out")


class LostRank(TitanError):
    """Another rank has ended or hangs, and with it this one's work."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among `tp`; `talk` is their group for what the first alone knows, such as what a person types."""

    tp: int
    rank: int
    device: torch.device
    talk: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def told_by_first(self, value: Any) -> Any:
        """The first rank's `value`, on all ranks; they wait for it as long as a person thinks."""
        if self.tp == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.talk)
        return box[0]


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
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", tp))
    if torch.cuda.is_available() and num_local > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {tp} needs {num_local} GPUs on this machine, which has {torch.cuda.device_count()}",
            tries=["CUDA_VISIBLE_DEVICES= titan infer …, to run on the CPU"],
        )


def own_device() -> torch.device:
    """This rank's GPU, made the current one, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))))
    torch.cuda.set_device(device)
    return device


@contextmanager
def joined(tp: int, device: torch.device) -> Iterator[Ranks]:
    """Meet the other ranks, of which there are none with tp 1, and part from them when the work went well.

    Raises LostRank where one of them has gone or hangs: what is wrong is told there.
    """
    if tp == 1:
        yield Ranks(1, 0, device)
        return
    use_one_worker()
    on_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", timeout=_LOADING_TIMEOUT, device_id=device if on_gpu else None
        )
        _set_timeout(COLLECTIVE_TIMEOUT)
        talk = dist.new_group(backend="gloo", timeout=_A_PERSON_TYPES)
        yield Ranks(tp, dist.get_rank(), device, talk)
        dist.barrier()  # so that no rank sees a peer vanish
        if on_gpu:
            gc.collect()  # a CUDA graph that is still there holds NCCL up forever
    except RuntimeError as error:
        told, rank = str(error), f"rank {os.environ['RANK']}"
        if any(sign in told for sign in _LOST):
            raise LostRank(
                f"{rank} has lost another rank, which ended or cannot be reached",
                hint=f"that one says why: {told.splitlines()[0]:.200}",
            ) from error
        if any(sign in told for sign in _HANGS):
            raise LostRank(
                f"{rank} has waited in vain for another rank", hint=f"{told.splitlines()[0]:.200}"
            ) from error
        raise
    dist.destroy_process_group()  # not after an error: a peer may be gone, and tearing down would hang


def _set_timeout(timeout: timedelta) -> None:
    # torch 2.15 has the public one and warns of the other; up to 2.13 it is not there
    (dist.set_timeout if hasattr(dist, "set_timeout") else distributed_c10d._set_pg_timeout)(timeout, None)
