"""Sixty-four ranks on gloo, as on CPUs and for agreement beside NCCL: they connect to few others, in little memory."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import FORK_SERVER

NUM_RANKS = 64


def join_and_count(rank, port, results):
    """Join as a rank of a run does, use both groups, and put the number of sockets."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    from trainer.ranks.process_group import join_ranks

    torch.set_num_threads(1)
    ranks = join_ranks(init_timeout_secs=300)
    total = torch.ones(3)
    dist.all_reduce(total)
    parts = [None] * NUM_RANKS
    dist.all_gather_object(parts, rank, group=ranks.agreement)
    words = ["from rank 0" if rank == 0 else None]
    dist.broadcast_object_list(words, src=0, group=ranks.agreement)
    dist.barrier()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    sockets = sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))
    results.put((rank, sockets, total.tolist(), parts == [*range(NUM_RANKS)], words))
    dist.barrier()


@pytest.mark.slow
def test_ranks_connect_to_few_others(tell):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    results = FORK_SERVER.Queue()
    processes = [
        FORK_SERVER.Process(target=join_and_count, args=(rank, store.port, results), daemon=True)
        for rank in range(NUM_RANKS)
    ]
    try:
        for process in processes:
            process.start()
        found = sorted(results.get(timeout=300) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [rank for rank, *_ in found] == [*range(NUM_RANKS)]
    assert all(
        rest == ([NUM_RANKS] * 3, True, ["from rank 0"]) for _, _, *rest in map(list, found) for rest in [tuple(rest)]
    )
    most = max(sockets for _, sockets, *_ in found)
    tell(f"{NUM_RANKS} ranks, two groups: at most {most} sockets per rank; all to all would be {2 * (NUM_RANKS - 1)}")
    assert most <= 40
