"""The tensor-parallel ranks of one model: degree, devices, and work whose result all of them get."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from converters.errors import ConfigError, TitanError
from converters.manifest import in_threads
from titan_tools.launch import inside_launch
from trainer.agree import on_each, on_first
from trainer.process_group import own_gpu

T = TypeVar("T")


def tp_degree(requested: int | None) -> int:
    """The tensor-parallel degree; inside a launch it must be the launch's size."""
    if not inside_launch():
        return requested or 1
    world_size = int(os.environ["WORLD_SIZE"])
    if requested not in (None, world_size):
        raise ConfigError(
            f"--tp is {requested}, but the launcher started {world_size} ranks",
            tries=[f"--tp {world_size}", f"titan infer … --tp {requested} without torchrun"],
        )
    return world_size


def check_devices(tp: int) -> None:
    """Raise ConfigError where this machine has GPUs, but fewer than ranks."""
    # A launcher that does not set LOCAL_WORLD_SIZE says which GPU is this rank's; see `own_device`
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if inside_launch() else tp))
    if torch.cuda.is_available() and num_local > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {tp} needs {num_local} GPUs on this machine, which has {torch.cuda.device_count()}",
            tries=["CUDA_VISIBLE_DEVICES= titan infer …, to run on the CPU"],
        )


def own_device(tp: int) -> torch.device:
    """The CPU, or this rank's GPU, made the current one. Raises ConfigError where the launcher does not name it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))
    device = own_gpu() if tp > 1 else torch.device("cuda", int(number))
    torch.cuda.set_device(device)
    return device


def machine_identity() -> tuple[str, str, str]:
    """Host name, boot id and PID namespace: a container has files and process ids of its own, like a machine."""
    boot_id, pid_namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    is_linux = boot_id.is_file() and pid_namespace.is_symlink()
    return socket.gethostname(), *((boot_id.read_text(), os.readlink(pid_namespace)) if is_linux else ("", ""))


@dataclass(frozen=True, slots=True)
class TPRanks:
    """This rank among `tp`.

    `control_group`: a gloo group of all ranks for Python objects, without a timeout, since a person may be typing.
    `machine_group`: a gloo group of the ranks on this machine, which see the same files.
    """

    tp: int
    rank: int
    device: torch.device
    control_group: Any = None
    machine_group: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers. Every rank must call this."""
        if self.tp == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def done_by_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only; all ranks return its result or raise its error."""
        return work() if self.tp == 1 else on_first(self.control_group, work)

    def done_by_each(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `work` on every rank; return this rank's result, or raise on all ranks the error of the lowest."""
        if self.tp == 1:
            return work(*args, **kwargs)
        own: list[T] = []

        def run() -> None:
            try:
                own.append(work(*args, **kwargs))
            except TitanError as error:
                if self.machine_group.size() < self.tp:
                    error.hint = f"{error.hint}; on rank {self.rank} of {machine_identity()[0]}".removeprefix("; ")
                raise

        on_each(self.control_group, run)
        return own[0]

    def divided(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """The results of `works`, each run on one rank of this machine, in a few threads."""
        if self.tp == 1:
            return in_threads(works)
        num, own = self.machine_group.size(), self.machine_group.rank()
        parts = on_each(self.machine_group, lambda: in_threads(works[own::num]))
        return [parts[i % num][i // num] for i in range(len(works))]
