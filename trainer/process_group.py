"""Process-group setup and teardown: device, groups, timeouts; and a fake group for dry runs and estimates."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from converters.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.sections import Comm
    from trainer.mesh import Meshes

# Messages of gloo, NCCL and the store when a peer has ended, and when it did not answer in time
PEER_ENDED = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Connection refused",
    "Connection was likely closed", "remote process exited", "Failed to recv",
)  # fmt: skip
TIMED_OUT = ("Timed out", "timed out", "Timeout", "timeout")
# Writing a large checkpoint takes longer than any training step.
CHECKPOINT_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's device, and a gloo group of all ranks for checkpoints and agreement, apart from training's groups."""

    device: torch.device
    agreement: dist.ProcessGroup


def join_ranks(*, init_timeout_secs: int, has_cpu_tensors: bool = False) -> Ranks:
    """Join the process group that the launcher's environment describes: NCCL where there are GPUs, else gloo.

    `has_cpu_tensors` adds gloo to NCCL, for gradients that CPU offload keeps in host memory.
    """
    use_one_worker()
    timeout = timedelta(seconds=init_timeout_secs)
    if torch.cuda.is_available():
        device = own_gpu()
        torch.cuda.set_device(device)
        if has_cpu_tensors:  # not bound to a device: meshes split a bound group, and only its NCCL part
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
        else:
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    return Ranks(device, dist.new_group(backend="gloo", timeout=CHECKPOINT_TIMEOUT))


class Timeouts:
    """How long a collective may take: `init_timeout_seconds` in the first step and the first validation, which compile
    and connect, else `train_timeout_seconds`. Every change comes after a barrier, so that no rank waits with the short
    timeout for one that still compiles.
    """

    def __init__(self, meshes: "Meshes", comm: "Comm"):
        axes = ("pp", "dp_replicate", "fsdp", "tp", "batch", "cp", "loss")
        self._groups = [None, *(meshes[axis].get_group() for axis in axes)]
        self._comm = comm
        self._is_validated = False
        self._set(comm.init_timeout_seconds)  # torch gives groups of meshes its own default

    def end_first_step(self) -> None:
        dist.barrier()
        self._set(self._comm.train_timeout_seconds)

    @contextmanager
    def of_validation(self) -> Iterator[None]:
        if self._is_validated:
            yield
            return
        before = self._secs
        self._set(self._comm.init_timeout_seconds)
        yield
        dist.barrier()
        self._set(before)
        self._is_validated = True

    def _set(self, secs: int) -> None:
        self._secs = secs
        for group in self._groups:
            set_timeout(timedelta(seconds=secs), group)


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set how long a collective of a group may take; None means the default group."""
    is_public = hasattr(dist, "set_timeout")  # new in torch 2.15, which warns about the private one
    (getattr(dist, "set_timeout") if is_public else distributed_c10d._set_pg_timeout)(timeout, group)  # noqa: B009  torch's stubs lack it


def leave_ranks() -> None:
    """Destroy the process group after a barrier, so that no rank sees a peer disappear."""
    dist.barrier()
    dist.destroy_process_group()


def own_gpu() -> torch.device:
    """This rank's GPU, by its number on this machine: torchrun's LOCAL_RANK, or srun's SLURM_LOCALID.

    A task of `srun --gpus-per-task=1` sees its own GPU only, as number 0.
    """
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    if not number.isdecimal():
        raise ConfigError(
            f"LOCAL_RANK = {number!r} is not the number of this rank's GPU",
            hint="torchrun and `titan train` set it; another launcher must set it to 0, 1, … on each machine",
        )
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1 and os.environ.get("SLURM_LOCALID") == number:
        return torch.device("cuda", 0)
    if int(number) >= num_gpus:
        raise ConfigError(
            f"rank {number} of this machine has no GPU: torch sees {num_gpus}",
            hint="start at most one rank per GPU",
            tries=["CUDA_VISIBLE_DEVICES=, to run on the CPU"],
        )
    return torch.device("cuda", int(number))


def use_one_worker() -> None:
    """Create gloo groups with one worker thread and a shared device from now on, in this process.

    torch gives each group two threads, and both write the name of the collective that they completed last into one
    std::string of their group, without a lock (torch 2.13, `ProcessGroupGloo::runLoop`). "ALLGATHER_COALESCED", the
    name of DTensor's all-gathers, is stored on the heap, shorter names inside the string: one thread frees what the
    other writes into. Under tensor or context parallelism this corrupted the heap, rarely, and a later allocation
    crashed. Collectives of a group run in the same order on all ranks, so one thread is enough.
    """
    if not dist.is_gloo_available() or hasattr(dist.ProcessGroupGloo.__init__, "__wrapped__"):
        return
    # torch accepts no options for a gloo group, and has no setting: the constructor is the only place to set threads
    dist.ProcessGroupGloo.__init__ = _with_one_worker(dist.ProcessGroupGloo.__init__)  # type: ignore[method-assign]


def _with_one_worker(construct: Any) -> Any:
    @functools.wraps(construct)
    def __init__(
        self: Any, store: Any, rank: int, size: int, options: Any = None, *, timeout: timedelta | None = None
    ) -> None:
        options_type: Any = dist.ProcessGroupGloo._Options  # type: ignore[attr-defined]
        if not isinstance(options, options_type):
            timeout = options or timeout
            options = options_type()
            options._devices = list(_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", "")))
            if timeout is not None:
                options._timeout = timeout
        options._threads = 1
        construct(self, store, rank, size, options)

    return __init__


@functools.cache
def _devices(pid: int, interfaces: str) -> tuple[Any, ...]:
    """The devices that torch uses by default, made once per process instead of once per group.

    Each has a thread that wakes up a hundred times a second and outlives its group. A fork, with another `pid`, has
    none.
    """
    gloo = dist.ProcessGroupGloo
    if len(interfaces) > 1:  # the same condition as torch's
        return tuple(gloo.create_device(interface=name) for name in interfaces.split(","))
    return (gloo.create_default_device(),)


@contextmanager
def fake_ranks(world_size: int, *, rank: int) -> Iterator[None]:
    """Make this process `rank` of `world_size` without peers: collectives only allocate.

    The process must not have a process group; it has none afterwards either.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # its entries name groups that no longer exist
