"""The harness itself: what a rank returns or raises arrives, and a failure does not spoil the next case."""

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import Pool, RankFailure


def sum_of_ranks(start: int) -> int:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 went wrong")
    dist.barrier()  # which rank 1 never reaches


def test_results_by_rank():
    pool = Pool(2)
    assert pool.run(sum_of_ranks, 10) == [21, 21]
    processes = list(pool._processes)
    assert pool.run(sum_of_ranks, 0) == [1, 1]
    assert pool._processes == processes  # nothing was started anew
    pool.stop()


def test_a_failing_rank_is_told_and_replaced():
    pool = Pool(2)
    with pytest.raises(RankFailure, match="(?s)rank 1:.*ValueError: rank 1 went wrong"):
        pool.run(fail_on_rank_1)
    assert pool.run(sum_of_ranks, 0) == [1, 1]
    pool.stop()
