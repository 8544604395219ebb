"""The harness itself: what a rank returns or raises arrives, and a failure does not spoil the next case."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tests.dist.pool import Pool, RankFailure
from trainer.config.sections import Parallelism
from trainer.job.job import resolve
from trainer.ranks.mesh import make_meshes


def sum_of_ranks(start: int) -> int:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def product_over_ranks(degree: int) -> float:
    """A matrix product that DTensor reduces, over a mesh of the trainer's."""
    mesh = make_meshes(resolve(Parallelism(tensor_parallel_degree=degree), 4), "cpu")["tp"]
    row, column = torch.ones(1, 2 * degree), torch.ones(2 * degree, 1)
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


def test_what_dtensor_remembers_of_a_mesh_holds_in_the_next_case(pools):
    for degree in (2, 4, 2):
        assert pools[4].run(product_over_ranks, degree) == [2 * degree] * 4
