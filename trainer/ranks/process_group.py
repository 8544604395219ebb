"""Process-group setup and teardown: device, groups, timeouts; and a fake group for dry runs and estimates."""

import functools
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from converters.common.errors import ConfigError
from trainer.ranks.rendezvous import explained_connections, join_group

if TYPE_CHECKING:
    from trainer.config.sections import Comm
    from trainer.ranks.mesh import Meshes

# Messages of gloo, NCCL and the store when a peer has ended, and when it did not answer in time
PEER_ENDED = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Connection refused",
    "Connection was likely closed", "remote process exited", "Failed to recv",
)  # fmt: skip
TIMED_OUT = ("Timed out", "timed out", "Timeout", "timeout")
# Writing a large checkpoint takes longer than any training step.
CHECKPOINT_TIMEOUT = timedelta(hours=2)
_MAX_DESCRIPTORS = 65536
_MAX_CONNECTED = 32  # ranks of a gloo group that all connect to each other at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's device, and a gloo group of all ranks for checkpoints and agreement, apart from training's groups."""

    device: torch.device
    agreement: dist.ProcessGroup


def join_ranks(*, init_timeout_secs: int, has_cpu_tensors: bool = False) -> Ranks:
    """Join the process group that the launcher's environment describes: NCCL if there are GPUs, else gloo.

    `has_cpu_tensors` adds gloo to NCCL, for gradients that CPU offload keeps in host memory.
    """
    use_one_worker()
    raise_descriptor_limit()
    timeout = timedelta(seconds=init_timeout_secs)
    if torch.cuda.is_available():
        device = own_gpu()
        torch.cuda.set_device(device)
        if has_cpu_tensors:  # not bound to a device: meshes split a bound group, and only its NCCL part
            join_group("cpu:gloo,cuda:nccl", timeout=timeout)
        else:
            join_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        join_group("gloo", timeout=timeout)
    with explained_connections():
        return Ranks(device, dist.new_group(backend="gloo", timeout=CHECKPOINT_TIMEOUT))


def raise_descriptor_limit() -> None:
    """Let this process open as many files and sockets as it may, within reason; the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Timeouts:
    """The time limits of collectives: `init_timeout_seconds` in the first step and the first validation, which compile
    and connect, else `train_timeout_seconds`. Every change comes after a barrier, so that no rank waits with the short
    timeout for one that still compiles.
    """

    def __init__(self, meshes: "Meshes", comm: "Comm"):
        self._groups = [None, *meshes.groups.values()]
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
    def __init__(self: Any, store: Any, rank: int, size: int, *args: Any, **settings: Any) -> None:
        options = _options_of_one_worker(size, *args, **settings)
        if options is None:  # a later torch: as it is called
            construct(self, store, rank, size, *args, **settings)
        else:
            construct(self, store, rank, size, options)

    return __init__


def _options_of_one_worker(size: int, options: Any = None, *unknown: Any, **settings: Any) -> Any:
    """The arguments of a gloo group as its options, with one worker. None if the options of this torch lack one."""
    type_: Any = getattr(dist.ProcessGroupGloo, "_Options", None)
    if type_ is None or unknown:
        return None
    if not isinstance(options, type_):
        if options is not None:
            settings["timeout"] = options
        options = type_()
        settings["devices"] = _devices(size)
    for name, value in {**settings, "threads": 1}.items():
        field = next((each for each in (name, f"_{name}") if hasattr(options, each)), None)
        if field is None:
            return None
        setattr(options, field, value)
    return options


def _devices(size: int) -> list[Any]:
    """The devices of a gloo group of `size` ranks.

    Large groups connect two ranks when they first exchange data: a connection to each of 511 others, in every group,
    would need more file descriptors than a process usually may open. Such a device serves one group only: with two,
    gloo (torch 2.13) takes a rank's connection of one group for that of the other.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [*(_shared_devices(os.getpid(), interfaces) if size <= _MAX_CONNECTED else _create(interfaces, lazy=True))]


@functools.cache
def _shared_devices(pid: int, interfaces: str) -> tuple[Any, ...]:
    """Devices of all small groups, made once per process instead of once per group.

    Each has a thread that wakes up a hundred times a second and outlives its group. A fork, with another `pid`, has
    none.
    """
    return _create(interfaces, lazy=False)


def _create(interfaces: str, *, lazy: bool) -> tuple[Any, ...]:
    create = functools.partial(dist.ProcessGroupGloo.create_device, lazy_init=lazy)
    if len(interfaces) > 1:  # the same condition as torch's
        return tuple(create(interface=name) for name in interfaces.split(","))
    if address := own_address():
        return (create(hostname=address),)
    return (dist.ProcessGroupGloo.create_default_device(lazy_init=lazy),)


def own_address() -> str | None:
    """The address of this machine that other ranks reach: the one that routes to MASTER_ADDR. None without it."""
    master = os.environ.get("MASTER_ADDR")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return address_towards(master, may_be_loopback=is_one_machine) if master else None


def address_towards(host: str, *, may_be_loopback: bool = False) -> str | None:
    """The address of this machine that routes to `host`. None without a route.

    torch takes the host name's address, which is 127.0.1.1 on many machines. On `host` itself that route may be
    loopback, too; then it is the address of the default route.
    """
    addresses = [address for each in (host, *_ELSEWHERE) if (address := _source_address(each))]
    from_outside = (a for a in addresses if may_be_loopback or not ipaddress.ip_address(a).is_loopback)
    return next(from_outside, addresses[0] if addresses else None)


_ELSEWHERE = (
    "192.0.2.1",
    "2001:db8::1",
)  # addresses for documentation (RFC 5737, RFC 3849): only the route is asked for


def _source_address(host: str) -> str | None:
    """The local address of a datagram to `host`. Nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:  # no such host, or no route
        return None


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
