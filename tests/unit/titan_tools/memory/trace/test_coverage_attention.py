"""Attention in fp32 in a trace: torch's plain products for grouped queries, held to the same on real tensors."""

from dataclasses import replace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.dist.training import Layout, args_of
from tests.real_memory import held_by_fake_rank, held_by_trace
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from trainer.job import Job, resolve

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPED = replace(args_of("debug_gqa"), num_layers=1)
LENGTH = 128
CP = {"context_parallel_degree": 2}


def made_from(parallelism: dict, args) -> tuple:
    layout = Layout("fp32", 2, parallelism, {"seq_len": LENGTH, "local_batch_size": 2})
    config = layout.config("debug_gqa")
    return config, args, resolve(config.parallelism, 2)


@pytest.mark.parametrize(
    "parallelism",
    [pytest.param({}, id="whole", marks=pytest.mark.slow), pytest.param(CP, id="context parallel")],
)
def test_grouped_queries_keep_all_scores_as_real_ones_do(parallelism):
    case = made_from(parallelism, GROUPED)
    fake = held_by_trace(capture(Job.of(*case), rank=0, kernels=Kernels(attention="flash")))
    with sdpa_kernel(SDPBackend.MATH):
        real = held_by_fake_rank(*case, rank=0)
    assert fake.peak_bytes == real.peak_bytes


@pytest.mark.parametrize(("parallelism", "queries"), [({}, LENGTH), (CP, LENGTH // 4)])
def test_other_queries_keep_a_number_each(parallelism, queries):
    heads = replace(GROUPED, num_kv_heads=GROUPED.num_heads)
    few, all_scores = (sizes_in_layer(made_from(parallelism, args)) for args in (heads, GROUPED))
    assert 4 * 2 * heads.num_heads * queries in few
    assert sum(few) < sum(all_scores)  # although it has more keys and values


def sizes_in_layer(case: tuple) -> list[int]:
    trace = capture(Job.of(*case), rank=0, kernels=Kernels(attention="cudnn"), num_steps=1)
    return [b.num_bytes for b in trace.blocks if b.point.phase == "forward" and b.point.module == "layers.0"]
