"""Schedules that compute gradients of weights apart: the same gradients as those that do not, to the last bit.

In fp32 they are layouts like any other (test_parity.py).
"""

import pytest
import torch

from tests.dist.layouts import MICROBATCH, PP, SCHEDULE
from tests.dist.training import Layout, first_gradients

BF16 = {"training": {"mixed_precision_param": "bfloat16"}}
FLOAT8 = {"model": {"converters": ("quantize.linear.float8",)}, "float8": {"emulate": True}}


def gradients(pools, schedule: str, sections: dict) -> dict[str, torch.Tensor]:
    layout = Layout(schedule, 2, {PP: 2, SCHEDULE: schedule, MICROBATCH: 1}, sections=sections)
    return {fqn: g for output in pools[2].run(first_gradients, layout, "debug_gqa") for fqn, g in output.items()}


@pytest.mark.parametrize("sections", [BF16, pytest.param(FLOAT8, marks=pytest.mark.slow)], ids=["bf16", "float8"])
def test_gradients_are_added_up_in_the_same_precision(pools, sections):
    whole, exact = gradients(pools, "1F1B", sections), gradients(pools, "1F1B", {})
    assert not any(gradient.equal(exact[fqn]) for fqn, gradient in whole.items())  # it is another precision
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        split = gradients(pools, schedule, sections)
        assert split.keys() == whole.keys()
        assert [fqn for fqn, gradient in split.items() if not gradient.equal(whole[fqn])] == []
