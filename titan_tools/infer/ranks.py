"""The tensor-parallel ranks of one model: devices, process groups, shared work, and errors for ranks that are lost."""

import gc
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from converters.common.errors import ConfigError, TitanError
from converters.store.manifest import in_threads
from titan_tools.launch.launched import started_by_titan
from titan_tools.launch.rank import inside_launch
from trainer.ranks.agree import on_each, on_first
from trainer.ranks.machine import machine_identity
from trainer.ranks.process_group import PEER_ENDED, TIMED_OUT, own_gpu, set_timeout, use_one_worker
from trainer.ranks.rendezvous import LostRank, explained_connections, join_group, launched

# A rank that ended closes its connections, which shows at once; a machine that lost power does not. On a single machine
# there is no timeout: a rank may be stopped by Ctrl-Z, or its output may wait for a reader.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
_NO_TIMEOUT = timedelta(days=30)
_SETUP_TIMEOUT = timedelta(minutes=10)
_POLL_MS = 200
_GRACE_SECS = 1  # for this rank to fail by itself, with a better message, of what ended the other

T = TypeVar("T")


def tp_degree(requested: int | None) -> int:
    """The tensor-parallel degree; inside a launch it must be the launch's size."""
    if (own := launched()) is None:
        return requested or 1
    world_size = own.world_size
    if requested not in (None, world_size):
        raise ConfigError(
            f"--tp is {requested}, but the launcher started {world_size} ranks",
            tries=[f"--tp {world_size}", f"titan infer … --tp {requested} without torchrun"],
        )
    return world_size


def check_devices(tp: int) -> None:
    """Raise ConfigError if this machine has GPUs, but fewer than ranks."""
    # A launcher that does not set LOCAL_WORLD_SIZE says which GPU is this rank's; see `own_device`
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if inside_launch() else tp))
    if torch.cuda.is_available() and num_local > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {tp} needs {num_local} GPUs on this machine, which has {torch.cuda.device_count()}",
            tries=["CUDA_VISIBLE_DEVICES= titan infer …, to run on the CPU"],
        )


def own_device(tp: int) -> torch.device:
    """The CPU, or this rank's GPU, made the current one. Raises ConfigError if the launcher does not name it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))
    device = own_gpu() if tp > 1 else torch.device("cuda", int(number))
    torch.cuda.set_device(device)
    return device


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

    @property
    def on_this_machine(self) -> list[int]:
        """The ranks that share this machine's memory."""
        return [self.rank] if self.machine_group is None else dist.get_process_group_ranks(self.machine_group)

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


@contextmanager
def tensor_parallel_group(tp: int) -> Iterator[TPRanks]:
    """Set up the process groups of `tp` ranks (none with 1); tear them down after success.

    Raises LostRank if another rank has ended or hangs; that one reports the reason.
    """
    device = own_device(tp)
    if tp == 1:
        yield TPRanks(1, 0, device)
        return
    use_one_worker()
    on_gpu = device.type == "cuda"
    try:
        join_group("nccl" if on_gpu else "gloo", timeout=_SETUP_TIMEOUT, device_id=device if on_gpu else None)
        with explained_connections():
            rank, control_group = dist.get_rank(), dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        machines = _ranks_by_machine(control_group)
        set_timeout(_NO_TIMEOUT if len(machines) == 1 else COLLECTIVE_TIMEOUT)
        machine_group = _machine_group(machines, control_group)
        processes = _other_processes(machine_group) if on_gpu else {}  # gloo notices ended ranks itself
        with exit_with_lost_ranks(processes, rank=rank):
            yield TPRanks(tp, rank, device, control_group, machine_group)
        dist.barrier(control_group)  # no rank ends before the others are done
        if on_gpu:
            gc.collect()  # NCCL's teardown waits for every CUDA graph that still exists
    except RuntimeError as error:
        message, this_rank = str(error), f"rank {os.environ['RANK']}"
        if any(sign in message for sign in PEER_ENDED):
            raise LostRank(
                f"{this_rank} has lost another rank, which ended or cannot be reached",
                hint=f"that rank reports the reason: {message.splitlines()[0]:.200}",
            ) from error
        if any(sign in message for sign in TIMED_OUT):
            raise LostRank(
                f"{this_rank} timed out while waiting for another rank",
                hint=f"it hangs, was stopped, or its machine is down: {message.splitlines()[0]:.200}",
            ) from error
        raise
    dist.destroy_process_group()  # not after an error: without its peers it would hang


@contextmanager
def exit_with_lost_ranks(others: Mapping[int, int], *, rank: int) -> Iterator[None]:
    """Inside the block, end this process within two seconds after one of `others` (process id → rank) has ended.

    NCCL waits for an ended rank as for a slow one, so a thread polls the processes of this machine. Does nothing where
    the system has no process descriptors.
    """
    descriptors, is_done = open_pidfds(others), threading.Event()
    if descriptors:
        threading.Thread(target=_poll, args=(descriptors, is_done, rank), daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _poll(descriptors: Mapping[int, int], is_done: threading.Event, rank: int) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    while not (ended := poll.poll(_POLL_MS)):
        if is_done.is_set():
            return
    if is_done.wait(_GRACE_SECS):
        return
    if not started_by_titan():  # titan's own launcher reports the rank that failed first
        other = descriptors[ended[0][0]]
        print(f"error: rank {rank} has lost rank {other}, which ended\nhint: see its output", file=sys.stderr)
        sys.stderr.flush()
    os._exit(LostRank.exit_code)  # the main thread is inside NCCL, where no exception reaches it


def open_pidfds(processes: Mapping[int, int]) -> dict[int, int] | None:
    """For process id → rank: process descriptor → rank; a descriptor becomes readable when its process ends.

    None if the system has no process descriptors.
    """
    try:
        return {os.pidfd_open(pid): rank for pid, rank in processes.items()}
    except (AttributeError, OSError):
        return None


def _ranks_by_machine(group: dist.ProcessGroup) -> list[list[int]]:
    machines: list[Any] = [None] * group.size()
    dist.all_gather_object(machines, machine_identity(), group=group)
    return [[rank for rank, other in enumerate(machines) if other == one] for one in dict.fromkeys(machines)]


def _other_processes(group: dist.ProcessGroup) -> dict[int, int]:
    """Process id → rank of the other ranks of a group."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (os.getpid(), dist.get_rank()), group=group)
    return {pid: rank for pid, rank in found if pid != os.getpid()}


def _machine_group(machines: list[list[int]], control_group: dist.ProcessGroup) -> dist.ProcessGroup:
    if len(machines) == 1:
        return control_group
    (own,) = [ranks for ranks in machines if dist.get_rank() in ranks]
    # Each machine by itself: where a call names ranks of another machine only, torch takes part in a split of the bound
    # NCCL group, which waits for all ranks of the world
    group: dist.ProcessGroup = dist.new_group(own, timeout=_NO_TIMEOUT, backend="gloo", use_local_synchronization=True)
    return group
