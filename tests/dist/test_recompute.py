"""What activation checkpointing computes again, seen from other ranks: they must not be asked twice."""

import pytest

from tests.dist.layouts import CP, FULL, OP, TP
from tests.dist.training import Layout, count_collectives


@pytest.mark.parametrize("axis", [TP, pytest.param(CP, marks=pytest.mark.slow)])
def test_op_checkpointing_waits_for_no_rank_twice(pools, axis):
    plain = Layout("plain", 2, {axis: 2})
    kept = Layout("op", 2, {axis: 2}, sections={"activation_checkpoint": OP})
    again = Layout("full", 2, {axis: 2}, sections={"activation_checkpoint": FULL})
    once, same, more = (pools[2].run(count_collectives, layout, "debug_gqa") for layout in (plain, kept, again))
    assert once == same
    assert all(0 < a < b for a, b in zip(once, more, strict=True))
