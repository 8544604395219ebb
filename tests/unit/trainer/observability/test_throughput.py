"""FLOP utilization against published figures, the step clock, and peak memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from converters.families.llama3 import FLAVORS, LLAMA3
from converters.families.qwen3 import QWEN3
from converters.families.registry import get_family
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.next_token.numbers import flops_per_token
from trainer.next_token.objective import NEXT_TOKEN
from trainer.observability.throughput import (
    StepClock,
    peak_memory,
)
from trainer.ranks.gpus import data_sheet


@pytest.mark.parametrize(("flavor", "gflops"), [("8B", 57.91), ("70B", 481.4), ("405B", 2625)])
def test_flops_per_token_are_the_published_ones(flavor, gflops):
    args = FLAVORS[flavor]
    count = flops_per_token(args, num_parameters=LLAMA3.num_parameters(args), seq_len=8192)
    assert count / 1e9 == pytest.approx(gflops, rel=2e-4)


def test_mfu_is_what_a_published_log_says():
    args = FLAVORS["8B"]  # AWS: 6,785 tokens/s on an H100 = 39.73 %
    count = flops_per_token(args, num_parameters=LLAMA3.num_parameters(args), seq_len=8192)
    assert 6785 * count / data_sheet("NVIDIA H100 80GB HBM3").bf16_flops == pytest.approx(0.3973, abs=1e-4)


@pytest.mark.parametrize(("flavor", "billions"), [("30B-A3B", (30.53, 3.35)), ("235B-A22B", (235.1, 22.2))])
def test_flops_of_a_mixture_count_the_experts_that_a_token_uses(flavor, billions):
    args = QWEN3.flavors[flavor]
    num_active = QWEN3.num_active_parameters(args)
    assert (QWEN3.num_parameters(args) / 1e9, num_active / 1e9) == pytest.approx(billions, rel=2e-3)
    with_one_more = replace(args, experts_per_token=args.experts_per_token + 1)
    one_expert = args.num_layers * 3 * args.dim * args.expert_hidden
    assert QWEN3.num_active_parameters(with_one_more) - num_active == one_expert
    attention = 12 * args.num_layers * args.num_heads * args.head_dim * 4096
    count = flops_per_token(args, num_parameters=num_active, seq_len=4096)
    assert count == 6 * (num_active - args.vocab_size * args.dim) + attention


@pytest.mark.parametrize(
    ("flavor", "num_matmul", "width"),  # width: heads × head_dim, which is not dim in 0.6B and 32B
    [
        # per layer q, k, v, o, three of the feed-forward, four norms; then the last norm and the output projection
        (
            "32B",
            64 * (5120 * 8192 * 2 + 5120 * 1024 * 2 + 3 * 5120 * 25600 + 2 * 5120 + 256) + 5120 + 151936 * 5120,
            8192,
        ),
        (
            "0.6B",
            28 * (1024 * 2048 * 2 + 1024 * 1024 * 2 + 3 * 1024 * 3072 + 2 * 1024 + 256) + 1024 + 151936 * 1024,
            2048,
        ),
    ],
)
def test_flops_of_qwen3_count_its_heads_and_its_tied_output(flavor, num_matmul, width):
    args = QWEN3.flavors[flavor]
    count = flops_per_token(args, num_parameters=QWEN3.num_parameters(args), seq_len=4096)
    assert count == 6 * num_matmul + 12 * args.num_layers * width * 4096


def test_flops_of_latent_attention_count_values_of_their_own_width():
    """As torchtitan v0.2.2 counts them (get_moe_model_nparams_and_flops): 192 features of a head of q, 128 of v."""
    family = get_family("deepseek_v3")
    args = family.flavors["671B"]
    num_active, seq_len = family.num_active_parameters(args), 4096
    words = ["--model.name=deepseek_v3", "--model.flavor=671B", f"--training.seq_len={seq_len}"]
    axes = ("data_parallel_shard", "tensor_parallel", "pipeline_parallel")
    words += [f"--parallelism.{axis}_degree=1" for axis in axes]
    count = NEXT_TOKEN.flops_per_unit(resolve_job(load_config("debug", words), 1))
    attention = 6 * 61 * 128 * (192 + 128) * seq_len
    assert count == 6 * (num_active - args.vocab_size * args.dim) + attention
    assert num_active / 1e9 == pytest.approx(37.55, abs=0.1)  # arXiv 2412.19437 says 37 B


def test_a_tied_embedding_counts_as_the_output_projection():
    tied, args = FLAVORS["debug_tied"], FLAVORS["debug_gqa"]
    counts = [flops_per_token(a, num_parameters=LLAMA3.num_parameters(a), seq_len=64) for a in (tied, args)]
    assert counts[0] == counts[1]


def test_peak_is_unknown_for_devices_that_are_not_listed():
    assert data_sheet("Some CPU").bf16_flops is None


def test_clock_counts_only_time_that_is_not_paused(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trainer.observability.throughput.time.perf_counter", lambda: now[0])
    clock = StepClock(flops_per_unit=10**9, num_ranks=2, peak=1e12)
    now[0] += 2.0
    clock.count_step(1000)
    with clock.fetching():
        now[0] += 1.0
    clock.pause()
    now[0] += 50.0  # a checkpoint
    clock.resume()
    now[0] += 1.0
    clock.count_step(1000)
    reading = clock.read()
    assert reading.data_secs == pytest.approx(0.5)
    assert clock.read().data_secs == 0
    assert reading.units_per_sec == pytest.approx(500)
    assert reading.secs_per_step == pytest.approx(2.0)
    assert reading.tflops_per_rank == pytest.approx(0.25)
    assert reading.mfu == pytest.approx(0.25)


def test_memory_on_the_cpu_is_the_resident_peak():
    memory = peak_memory(torch.device("cpu"))
    assert memory.keys() == {"memory_gib"} and 0.01 < memory["memory_gib"] < 100


def test_memory_on_cuda_is_what_is_reserved_and_what_of_it_is_in_use(monkeypatch):
    peaks = {"reserved": 4 << 30, "allocated": 2 << 30, "active": 3 << 30}
    stats = {f"{what}_bytes.all.peak": size for what, size in peaks.items()} | {"num_alloc_retries": 5, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    assert peak_memory(torch.device("cuda", 0)) == {
        "memory_gib": 4.0,
        "memory_allocated_gib": 2.0,
        "memory_active_gib": 3.0,
        "memory_capacity_gib": 80.0,
        "alloc_retries": 5,
        "ooms": 1,
    }
