"""Attention in a trace: plain products for grouped queries in fp32, and kernels for values of another width."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import trainer.parallel.context
from tests.dist.training import Layout, args_of
from tests.real_memory import held_by_fake_rank, held_by_trace
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels, efficient_backward_bytes, fused_attention, use_kernels
from trainer.job.job import resolve
from trainer.job.record import Job

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


@pytest.mark.parametrize(
    ("preferred", "width", "value_width", "chosen"),
    [
        ("cudnn", 192, 128, "cudnn"),
        ("flash", 192, 128, "efficient"),
        ("cudnn", 64, 128, "cudnn"),
        ("cudnn", 192, 64, "efficient"),
        ("cudnn", 24, 20, "math"),
        ("flash", 128, 128, "flash"),
    ],
)
def test_widths_of_queries_and_values_decide_on_the_kernel(preferred, width, value_width, chosen):
    assert fused_attention(preferred, width, value_width) == chosen


@pytest.mark.parametrize(("num_before", "is_cudnns"), [(0, True), (64, False), (128, True), (192, False), (200, True)])
def test_a_context_rank_is_estimated_with_the_kernel_that_it_runs(num_before, is_cudnns):
    q, k, v = (
        torch.empty(1, n, 4, 64, dtype=torch.bfloat16, device="meta") for n in (8, num_before + 8, num_before + 8)
    )
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with use_kernels(Kernels(attention="cudnn")), Calls():
        trainer.parallel.context.attend_to_prefix(q, k, v)
    assert any("cudnn_attention" in name for name in called) == is_cudnns
    assert any("flash_attention" in name for name in called) != is_cudnns


@pytest.mark.parametrize("attention", ["cudnn", "flash"])
@pytest.mark.parametrize(
    ("mask", "attn_type", "num_wide"), [("none", None, 3), ("offsets", "flex", 3), ("offsets", "varlen", 5)]
)
def test_only_varlen_pads_narrower_values_on_a_gpu(attention, mask, attn_type, num_wide):
    """q before and after its rotation, and k; with padding also v and the output."""
    args = replace(args_of("deepseek_v3/debug_v2"), num_layers=1, head_dim=40, rotary_dim=8, value_dim=24)
    training = {"seq_len": LENGTH, "local_batch_size": 2, "mixed_precision_param": "bfloat16", "document_mask": mask}
    config = Layout("latents", 1, {}, training).config("deepseek_v3/debug_v2")
    config = replace(config, model=replace(config.model, attn_type=attn_type))
    kernels = Kernels(device="cuda", attention=attention)
    trace = capture(Job.of(config, args, resolve(config.parallelism, 1)), rank=0, kernels=kernels, num_steps=1)
    sizes = [b.num_bytes for b in trace.blocks if b.point.phase == "forward" and b.point.module == "layers.0"]
    assert sizes.count(2 * LENGTH * args.num_heads * 40 * 2) == num_wide


def test_flex_attentions_result_is_kept_beside_the_one_that_sinks_scale():
    """On a CPU one operation computes the scaled one."""
    args = replace(args_of("gpt_oss_experts/debug_window"), num_layers=1, head_dim=40)
    training = {"seq_len": LENGTH, "local_batch_size": 2, "mixed_precision_param": "bfloat16"}
    config = Layout("sinks", 1, {}, training).config("gpt_oss_experts/debug_window")
    job, num_wide = Job.of(config, args, resolve(config.parallelism, 1)), {}
    for device in ("cuda", "cpu"):
        trace = capture(job, rank=0, kernels=Kernels(device=device), num_steps=1)
        sizes = [b.num_bytes for b in trace.blocks if b.point.phase == "forward" and b.point.module == "layers.0"]
        num_wide[device] = sizes.count(2 * LENGTH * args.num_heads * 40 * 2)
    assert num_wide["cuda"] == num_wide["cpu"] + 1


@pytest.mark.parametrize(
    ("batch", "heads", "num_bytes"),
    [
        # Per head dq of 4096 x 192 in 96 blocks with a lock each, a number per query, and dk and dv of 64 keys, with
        # 256 and 128 features: once for many heads, 12 times for 16 of them, which alone would not fill the GPU
        (1, 128, 128 * 4 * (96 * (128 * 64 + 4) + 4096 + 64 * (256 + 128))),
        (1, 16, 16 * 4 * (96 * (128 * 64 + 4) + 4096 + 12 * 64 * (256 + 128))),
    ],
)
def test_what_the_memory_efficient_kernel_allocates_in_backward(batch, heads, num_bytes):
    q, k, v = (torch.empty(batch, heads, 4096, width, dtype=torch.bfloat16, device="meta") for width in (192, 192, 128))
    assert efficient_backward_bytes((None, q, k, v)) == num_bytes
