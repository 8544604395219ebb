"""A checkpoint that goes from one number of ranks to another, in other layouts, stays bit for bit what it was: T51."""

from itertools import pairwise

import pytest

from tests.dist import runs
from tests.dist.pool import Pool

LAYOUTS = {
    1: {},
    4: {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    2: {"pipeline_parallel_degree": 2},
}
PATH = (1, 4, 2, 1, 2, 4, 1)  # every change from one number to another, once


@pytest.mark.slow
def test_every_change_of_the_number_of_ranks_keeps_all_bits(tmp_path):
    data = runs.make_data(tmp_path)
    pools = {size: Pool(size) for size in LAYOUTS}
    batch = {"global_batch_size": -1}

    def config(size):
        return runs.make_config(data, tmp_path, steps=2, training=batch, parallelism=LAYOUTS[size])

    try:
        assert pools[1].run(runs.run, config(1)) == [""]
        first = source = tmp_path / "checkpoint" / "step-2"
        assert len(set(pairwise(PATH))) == 6
        for turn, size in enumerate(PATH[1:]):
            copy = tmp_path / f"copy-{turn}"
            assert [p.step for p in pools[size].run(runs.copy_step, config(size), source, copy)] == [2] * size
            assert runs.differences(copy, first, without_rng=True) == []
            source = copy
    finally:
        for pool in pools.values():
            pool.stop()
