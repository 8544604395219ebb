"""Ranks of one machine bring parts together through shared memory: what messages give, in any timing, and no hang."""

import mmap
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.tiny_infer import complete, load
from tests.tiny_llama import BOS, write_llama
from titan_tools.infer.model import shared_memory
from titan_tools.infer.model.shared_memory import SLOT_BYTES, share_memory, sum_in_shared_memory
from titan_tools.infer.model.tensor_parallel import ProcessGroupCollectives
from trainer.ranks.rendezvous import LostRank

# The last one goes as messages in fp32; an odd number of them, so that each comes in both dtypes
SHAPES = [(1, 1, 64), (3, 1, 5), (1, 7, 33), (5,), (2, SLOT_BYTES // 8 + 1)]


def part_of(rank, number, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + number)).to(dtype)


def sums_and_gathers(tp):
    rank = dist.get_rank()
    shared, messages = share_memory(rank=rank, tp=tp), ProcessGroupCollectives(tp)
    assert shared is not None
    waits = random.Random(rank)
    output = []
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
        output.append(first.double().sum().item())
    return output


@pytest.mark.parametrize("tp", [2, 4])
def test_parts_come_together_as_by_messages_and_alike_on_all_ranks(pools, tp):
    output = pools[tp].run(sums_and_gathers, tp)
    assert all(rank == output[0] for rank in output)


def tokens_of(folder, tp):
    model = load(folder, tp=tp, rank=dist.get_rank())
    sum_in_shared_memory([model.body, model.head], rank=dist.get_rank(), tp=tp)
    assert "SharedMemory" in repr(model.head.collectives)
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


ORIGINALS = {name: getattr(shared_memory, name) for name in ("_open", "open_pidfds")}


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


def waited(tp):
    """Rank 1 comes late, as one whose terminal was stopped; what rank 0 got, and the share of a core it waited with."""
    shared = share_memory(rank=dist.get_rank(), tp=tp)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)
    before = time.process_time(), time.monotonic()
    summed = shared.sum(torch.ones(4))
    cpu, waited = time.process_time() - before[0], time.monotonic() - before[1]
    return summed.tolist(), cpu / max(waited, 1)  # where this rank began late, it waited for less than that second


def test_a_rank_that_is_late_is_waited_for_without_a_core(pools):
    (summed, share), (other, _) = pools[2].run(waited, 2)
    assert summed == other == [2] * 4 and share < 0.2


class Naps:
    """A poll and a clock of its own: rank 1 writes its part `secs` after the wait began."""

    def __init__(self, shared, secs):
        self.shared, self.secs, self.now, self.lengths = shared, secs, 0.0, []

    def poll(self, milliseconds):
        self.lengths.append((milliseconds, 1000 * self.now))
        self.now += max(milliseconds, 1) / 1000
        if self.now >= self.secs:
            self.shared._counters[shared_memory._STRIDE] = 1
        return []

    def monotonic(self):
        return self.now


def test_naps_are_short_compared_with_the_wait_and_never_long(monkeypatch):
    memory = mmap.mmap(-1, shared_memory._num_bytes(2))
    read, write = os.pipe()
    shared = shared_memory.SharedMemoryCollectives(memory, rank=0, ended={read: 1})
    shared._poll = naps = Naps(shared, 3)
    monkeypatch.setattr(shared_memory, "time", naps)
    # 25,000 turns, each of which may give a core away for milliseconds: minutes on a busy machine
    monkeypatch.setattr(os, "sched_yield", lambda: None)
    assert shared.sum(torch.ones(4)).tolist() == [1] * 4
    os.close(read), os.close(write)
    assert all(nap <= min(10, waited / 8) for nap, waited in naps.lengths)
    assert naps.lengths[-1][0] == 10 and naps.now < 3.02


def ended(tp):
    """Rank 1 says nothing more; rank 0 gives it up when its process has ended, here a stand-in's."""
    rank = dist.get_rank()
    shared = share_memory(rank=rank, tp=tp)
    if rank == 1:
        return
    child = os.fork()
    if child == 0:
        time.sleep(0.3)
        os._exit(0)
    stand_in = os.pidfd_open(child)
    shared._poll.register(stand_in)
    shared._ended |= {stand_in: 1}
    with pytest.raises(LostRank, match="has lost another rank"):
        shared.sum(torch.ones(4))
    os.waitpid(child, 0)


def test_a_rank_that_ended_is_reported(pools):
    pools[2].run(ended, 2)
