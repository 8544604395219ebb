"""Process-group setup and teardown for tensor parallelism, and errors for ranks that ended or hang."""

import gc
import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from converters.errors import TitanError
from titan_tools.infer.ranks import TPRanks, machine_identity, own_device
from titan_tools.launch import started_by_titan
from trainer.process_group import PEER_ENDED, TIMED_OUT, set_timeout, use_one_worker

# A rank that ended closes its connections, which shows at once; a machine that lost power does not. On a single machine
# there is no timeout: a rank may be stopped by Ctrl-Z, or its output may wait for a reader.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
_NO_TIMEOUT = timedelta(days=30)
_SETUP_TIMEOUT = timedelta(hours=2)
_POLL_MS = 200
_GRACE_SECS = 1  # for this rank to fail by itself, with a better message, of what ended the other


class LostRank(TitanError):
    """Another rank has ended or hangs."""

    exit_code = 3


@contextmanager
def tensor_parallel_group(tp: int) -> Iterator[TPRanks]:
    """Set up the process groups of `tp` ranks (none with 1); tear them down after success.

    Raises LostRank where another rank has ended or hangs; that one reports the reason.
    """
    device = own_device(tp)
    if tp == 1:
        yield TPRanks(1, 0, device)
        return
    use_one_worker()
    on_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", timeout=_SETUP_TIMEOUT, device_id=device if on_gpu else None
        )
        rank, control_group = dist.get_rank(), dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        machines = _ranks_by_machine(control_group)
        set_timeout(_NO_TIMEOUT if len(machines) == 1 else COLLECTIVE_TIMEOUT)
        machine_group = _machine_group(machines, control_group)
        others = _other_processes(machine_group) if on_gpu else {}  # gloo notices ended ranks itself
        with exit_with_lost_ranks(others, rank=rank, exit_code=LostRank.exit_code):
            yield TPRanks(tp, rank, device, control_group, machine_group)
        dist.barrier(control_group)  # no rank ends before the others are done
        if on_gpu:
            gc.collect()  # NCCL's teardown waits for every CUDA graph that still exists
    except RuntimeError as error:
        message, own = str(error), f"rank {os.environ['RANK']}"
        if any(sign in message for sign in PEER_ENDED):
            raise LostRank(
                f"{own} has lost another rank, which ended or cannot be reached",
                hint=f"that rank reports the reason: {message.splitlines()[0]:.200}",
            ) from error
        if any(sign in message for sign in TIMED_OUT):
            raise LostRank(
                f"{own} timed out while waiting for another rank",
                hint=f"it hangs, was stopped, or its machine is down: {message.splitlines()[0]:.200}",
            ) from error
        raise
    dist.destroy_process_group()  # not after an error: without its peers it would hang


@contextmanager
def exit_with_lost_ranks(others: Mapping[int, int], *, rank: int, exit_code: int) -> Iterator[None]:
    """Inside the block, end this process within two seconds after one of `others` (process id → rank) has ended.

    NCCL waits for an ended rank as for a slow one, so a thread polls the processes of this machine. Does nothing where
    the system has no process descriptors.
    """
    descriptors, is_done = open_pidfds(others), threading.Event()
    if descriptors:
        threading.Thread(target=_poll, args=(descriptors, is_done, rank, exit_code), daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def _poll(descriptors: Mapping[int, int], is_done: threading.Event, rank: int, exit_code: int) -> None:
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
    os._exit(exit_code)  # the main thread is inside NCCL, where no exception reaches it


def open_pidfds(processes: Mapping[int, int]) -> dict[int, int] | None:
    """For process id → rank: process descriptor → rank; a descriptor becomes readable when its process ends.

    None where the system has no process descriptors.
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
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        machines, timeout=_NO_TIMEOUT, backend="gloo"
    )
    return own
