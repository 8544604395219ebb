"""The harness itself: what a rank returns or raises arrives, and a failure does not spoil the next case."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tests.dist.pool import Pool, RankFailure


def sum_of_ranks(start: int) -> int:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def product_over_ranks(num_other_groups: int) -> float:
    """A matrix product that DTensor reduces, in a group that has another name if others were made first."""
    for _ in range(num_other_groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))["tp"]
    row, column = torch.ones(1, 6), torch.ones(6, 1)
    product = distribute_tensor(row, mesh, [Shard(1)]) @ distribute_tensor(column, mesh, [Shard(0)])
    assert product.placements == (Partial(),)
    return product.redistribute(placements=[Replicate()]).to_local().item()


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


def test_a_failing_rank_is_reported_and_replaced():
    pool = Pool(2)
    with pytest.raises(RankFailure, match="(?s)rank 1:.*ValueError: rank 1 went wrong"):
        pool.run(fail_on_rank_1)
    assert pool.run(sum_of_ranks, 0) == [1, 1]
    pool.stop()


def test_a_case_meets_nothing_that_dtensor_remembers_of_the_one_before(pools):
    assert pools[4].run(product_over_ranks, 5) == [6, 6, 6, 6]
    assert pools[4].run(product_over_ranks, 0) == [6, 6, 6, 6]  # there is no group of the name it had
