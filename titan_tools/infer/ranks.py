"""The ranks of one model: this one's place and device, how they meet, and what the first tells the others."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from converters.errors import ConfigError
from titan_tools.launch import inside_launch
from trainer.gloo import use_one_worker

# A rank that is gone shows at once, because its connections close; this is for one that hangs.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
_A_PERSON_TYPES = timedelta(days=30)


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

    def share(self, value: Any) -> Any:
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
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def join(tp: int, device: torch.device) -> Ranks:
    """Meet the other ranks; with tp 1 there are none."""
    if tp == 1:
        return Ranks(1, 0, device)
    use_one_worker()
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT, device_id=device if on_gpu else None
    )
    return Ranks(tp, dist.get_rank(), device, dist.new_group(backend="gloo", timeout=_A_PERSON_TYPES))


def leave(ranks: Ranks) -> None:
    """At the end of work that went well: after an error a peer may be gone, and tearing down would hang."""
    if ranks.tp > 1:
        dist.destroy_process_group()
