"""Ranks of one machine bring parts together through shared memory: what messages give, in any timing, and no hang."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.tiny_infer import complete, load
from tests.tiny_llama import BOS, write_llama
from titan_tools.infer.model import shared_memory
from titan_tools.infer.model.shared_memory import PLACE_BYTES, share_memory, sum_in_shared_memory
from titan_tools.infer.model.tensor_parallel import Messages
from titan_tools.infer.ranks import LostRank

# The last one goes as messages in fp32; an odd number of them, so that each comes in both dtypes
SHAPES = [(1, 1, 64), (3, 1, 5), (1, 7, 33), (5,), (2, PLACE_BYTES // 8 + 1)]


def part_of(rank, number, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + number)).to(dtype)


def sums_and_gathers(tp):
    rank = dist.get_rank()
    shared, messages = share_memory(rank=rank, tp=tp), Messages(tp)
    assert shared is not None
    waits = random.Random(rank)
    told = []
    for number in range(120):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        shape = SHAPES[number % len(SHAPES)]
        parts = [part_of(r, number, shape, dtype) for r in range(tp)]
        part = parts[rank]
        if waits.random() < 0.1:
            time.sleep(0.003)
        first, second = shared.sum(part.clone()), shared.gather(part)
        assert torch.equal(second, messages.gather(part))
        assert first.dtype == dtype and first.shape == part.shape
        exact = torch.stack(parts).double().sum(0)
        torch.testing.assert_close(first.double(), exact, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0.004)
        told.append(first.double().sum().item())
    return told


@pytest.mark.parametrize("tp", [2, 4])
def test_parts_come_together_as_by_messages_and_alike_on_all_ranks(pools, tp):
    told = pools[tp].run(sums_and_gathers, tp)
    assert all(rank == told[0] for rank in told)


def tokens_of(folder, tp):
    model = load(folder, tp=tp, rank=dist.get_rank())
    sum_in_shared_memory([model.body, model.head], rank=dist.get_rank(), tp=tp)
    assert "SharedMemory" in repr(model.head.over_ranks)
    return [c.tokens for c in complete(model, [[BOS, 7], [BOS, *range(30, 60)]], rows=2, max_new_tokens=16)]


def test_a_model_says_what_one_rank_says(pools, tmp_path):
    write_llama(tmp_path)
    alone = [c.tokens for c in complete(load(tmp_path), [[BOS, 7], [BOS, *range(30, 60)]], max_new_tokens=16)]
    assert pools[2].run(tokens_of, tmp_path, 2) == [alone, alone]


def without(tp, hidden):
    """What a rank gets where one of them cannot open the memory, or sees another's process identity."""
    if dist.get_rank() == 1:
        setattr(shared_memory, hidden, lambda *_, **__: None)
    try:
        return share_memory(rank=dist.get_rank(), tp=tp) is None
    finally:
        if dist.get_rank() == 1:
            setattr(shared_memory, hidden, ORIGINALS[hidden])


ORIGINALS = {name: getattr(shared_memory, name) for name in ("_open", "_watch")}


@pytest.mark.parametrize("hidden", ORIGINALS)
def test_what_one_rank_cannot_reach_none_uses(pools, hidden):
    assert pools[2].run(without, 2, hidden) == [True, True]


def test_memory_that_is_another_is_not_taken():
    descriptor, token = shared_memory._make(2)
    try:
        assert shared_memory._open(os.getpid(), descriptor, token, tp=2) is not None
        assert shared_memory._open(os.getpid(), descriptor, bytes(16), tp=2) is None
        assert shared_memory._open(os.getpid(), descriptor, token, tp=64) is None  # too small for so many
    finally:
        os.close(descriptor)


def ended_and_late(tp):
    """Rank 1 says nothing more; rank 0 gives it up when its process has ended, here a stand-in's, or is too late."""
    rank = dist.get_rank()
    shared = share_memory(rank=rank, tp=tp)
    if rank == 1:
        return
    try:
        shared_memory.COLLECTIVE_TIMEOUT, before = (
            shared_memory.COLLECTIVE_TIMEOUT * 0,
            shared_memory.COLLECTIVE_TIMEOUT,
        )
        with pytest.raises(LostRank, match="waited in vain"):
            shared.sum(torch.ones(4))
    finally:
        shared_memory.COLLECTIVE_TIMEOUT = before
    child = os.fork()
    if child == 0:
        os._exit(0)
    shared._poll.register(os.pidfd_open(child))
    shared._ended |= {fd: 1 for fd in range(3, 64) if fd not in shared._ended}
    with pytest.raises(LostRank, match="has lost another rank"):
        shared.sum(torch.ones(4))
    os.waitpid(child, 0)
    return


def test_a_rank_that_ended_or_hangs_is_told(pools):
    pools[2].run(ended_and_late, 2)
