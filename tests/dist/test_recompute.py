"""What activation checkpointing communicates again in backward."""

import pytest

from tests.dist.layouts import CP, FULL, OP, TP
from tests.dist.training import Layout, count_collectives

NUM_LAYERS = 4


@pytest.mark.parametrize(
    ("axis", "gathers", "sums"),
    [
        (TP, 2, 2),  # of a layer: the inputs of attention and of the feed-forward, and their results
        pytest.param(CP, 1, 0, marks=pytest.mark.slow),  # keys with values
    ],
)
def test_op_checkpointing_gathers_again_and_sums_once(pools, axis, gathers, sums):
    def count(name, **checkpointing):
        sections = {"activation_checkpoint": checkpointing} if checkpointing else {}
        return pools[2].run(count_collectives, Layout(name, 2, {axis: 2}, sections=sections), "debug_gqa")

    for once, op, full in zip(count("plain"), count("op", **OP), count("full", **FULL), strict=True):
        assert op["all_gather"] - once["all_gather"] == full["all_gather"] - once["all_gather"] == gathers * NUM_LAYERS
        assert op["reduce_scatter"] == once["reduce_scatter"]
        assert full["reduce_scatter"] - once["reduce_scatter"] == sums * NUM_LAYERS
