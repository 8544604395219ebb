"""Ranks meet, and part when the work is done. One that has lost another says so, and does not wait for it for ever."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from converters.errors import TitanError
from titan_tools.infer.ranks.devices import own_device
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.ranks.lost_neighbours import watching
from titan_tools.infer.ranks.machine import own_machine
from trainer.process_group import use_one_worker

# How long ranks wait for each other. One that is gone shows at once, because its connections close; but a machine that
# lost its power closes none. On a single machine only a person can tell a rank that hangs from one that was stopped by
# Ctrl-Z, or whose output waits for a reader.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
_A_PERSON_WAITS = timedelta(days=30)
_STARTING_TIMEOUT = timedelta(hours=2)
# What gloo, NCCL and the store say when a peer is gone, and when it hangs
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Connection refused",
    "Connection was likely closed", "remote process exited", "Failed to recv",
)  # fmt: skip
_HANGS = ("Timed out", "timed out")


class LostRank(TitanError):
    """Another rank has ended or hangs, and with it this one's work."""

    exit_code = 3


@contextmanager
def joined(tp: int) -> Iterator[Ranks]:
    """Meet the other ranks, of which there are none with tp 1, and part from them when the work went well.

    Raises LostRank where one of them has ended or hangs; that one says why.
    """
    device = own_device(tp)
    if tp == 1:
        yield Ranks(1, 0, device)
        return
    use_one_worker()
    on_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", timeout=_STARTING_TIMEOUT, device_id=device if on_gpu else None
        )
        rank, talk = dist.get_rank(), dist.new_group(backend="gloo", timeout=_A_PERSON_WAITS)
        machines = _ranks_of_machines(talk)
        _set_timeout(_A_PERSON_WAITS if len(machines) == 1 else COLLECTIVE_TIMEOUT)
        neighbours = _neighbours(machines, talk)
        others = _other_processes(neighbours) if on_gpu else {}  # a rank that uses gloo sees it for itself
        with watching(others, rank=rank, exit_code=LostRank.exit_code):
            yield Ranks(tp, rank, device, talk, neighbours)
        dist.barrier(talk)  # so that no rank sees a peer vanish; by gloo, which tells where one has
        if on_gpu:
            gc.collect()  # a CUDA graph that is still there holds NCCL up forever
    except RuntimeError as error:
        told, who = str(error), f"rank {os.environ['RANK']}"
        if any(sign in told for sign in _LOST):
            raise LostRank(
                f"{who} has lost another rank, which ended or cannot be reached",
                hint=f"that one says why: {told.splitlines()[0]:.200}",
            ) from error
        if any(sign in told for sign in _HANGS):
            raise LostRank(
                f"{who} has waited in vain for another rank",
                hint=f"it hangs, was stopped, or its machine is gone: {told.splitlines()[0]:.200}",
            ) from error
        raise
    dist.destroy_process_group()  # not after an error: a peer may be gone, and tearing down would hang


def _ranks_of_machines(group: dist.ProcessGroup) -> list[list[int]]:
    machines: list[Any] = [None] * group.size()
    dist.all_gather_object(machines, own_machine(), group=group)
    return [[rank for rank, other in enumerate(machines) if other == one] for one in dict.fromkeys(machines)]


def _other_processes(group: dist.ProcessGroup) -> dict[int, int]:
    """Process id → rank of those of a group on one machine, but this one's."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (os.getpid(), dist.get_rank()), group=group)
    return {pid: rank for pid, rank in found if pid != os.getpid()}


def _neighbours(machines: list[list[int]], everyone: dist.ProcessGroup) -> dist.ProcessGroup:
    if len(machines) == 1:
        return everyone
    groups = [dist.new_group(ranks, timeout=_A_PERSON_WAITS, backend="gloo") for ranks in machines]  # by all, of all
    return next(group for group, ranks in zip(groups, machines, strict=True) if dist.get_rank() in ranks)


def _set_timeout(timeout: timedelta) -> None:
    # torch 2.15 has the public one and warns of the other; up to 2.13 it is not there
    (dist.set_timeout if hasattr(dist, "set_timeout") else distributed_c10d._set_pg_timeout)(timeout, None)
