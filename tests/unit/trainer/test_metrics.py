"""MFU's formula against published figures, the log files, and the console line."""

import json

import pytest
import torch

from converters.families.llama3 import FLAVORS, LLAMA3
from converters.families.qwen3 import QWEN3
from titan_tools.run_folder import summarize_run
from trainer.gpus import data_sheet
from trainer.watching.metrics import (
    METRICS_FILE,
    MetricsLog,
    StepClock,
    flops_per_token,
    peak_memory,
    step_line,
)


@pytest.mark.parametrize(("flavor", "gflops"), [("8B", 57.91), ("70B", 481.4), ("405B", 2625)])
def test_flops_per_token_are_the_published_ones(flavor, gflops):
    args = FLAVORS[flavor]
    count = flops_per_token(args, num_parameters=LLAMA3.num_parameters(args), seq_len=8192)
    assert count / 1e9 == pytest.approx(gflops, rel=2e-4)


def test_mfu_is_what_a_published_log_says():
    args = FLAVORS["8B"]  # AWS: 6,785 tokens/s on an H100 = 39.73 %
    count = flops_per_token(args, num_parameters=LLAMA3.num_parameters(args), seq_len=8192)
    assert 6785 * count / data_sheet("NVIDIA H100 80GB HBM3").bf16_flops == pytest.approx(0.3973, abs=1e-4)


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


def test_a_tied_embedding_counts_as_the_output_projection():
    tied, args = FLAVORS["debug_tied"], FLAVORS["debug_gqa"]
    counts = [flops_per_token(a, num_parameters=LLAMA3.num_parameters(a), seq_len=64) for a in (tied, args)]
    assert counts[0] == counts[1]


def test_peak_is_unknown_for_devices_that_are_not_listed():
    assert data_sheet("Some CPU").bf16_flops is None


def test_clock_counts_only_time_that_is_not_paused(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trainer.watching.metrics.time.perf_counter", lambda: now[0])
    clock = StepClock(flops_per_token=10**9, num_ranks=2, peak=1e12)
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
    assert reading.tokens_per_sec == pytest.approx(500)
    assert reading.secs_per_step == pytest.approx(2.0)
    assert reading.tflops_per_rank == pytest.approx(0.25)
    assert reading.mfu == pytest.approx(0.25)


def test_records_are_appended_and_a_torn_line_is_left_behind(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    log = MetricsLog(path, console="", tensorboard_folder=tmp_path / "tb", color=False)
    log.write(3, {"loss": 1.5, "mfu": None, "grad_norm": float("nan")})
    log.close()
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1]) == {"step": 3, "loss": 1.5}
    assert len(lines) == 3

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 1.5)]


def test_records_of_a_part_that_was_given_up_are_marked(tmp_path):
    path = tmp_path / METRICS_FILE

    def run(steps, *, num_done):
        log = MetricsLog(path, console=None, tensorboard_folder=None, color=False, num_done=num_done)
        for step in steps:
            log.write(step, {"loss": 10.0 * (num_done + 1) + step})
        log.close()

    run([1, 2, 3, 4], num_done=0)
    run([5], num_done=4)  # goes on where the last one ended: nothing is there twice
    run([3], num_done=2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 2, 3]
    assert [record for record in records if "loss" not in record] == [{"step": 2, "resumed_from": 2}]
    assert summarize_run(tmp_path).loss == ((1, 11.0), (2, 12.0), (3, 33.0))  # 4 and 5 are not this run's


def test_step_line_says_mfu_only_where_it_is_known():
    scalars = {"loss": 3.25, "grad_norm": 1.5, "lr": 1e-3}
    scalars |= {"tokens_per_sec": 12345.0, "tflops_per_rank": 0.5, "memory_gib": 1.0, "data_secs": 0.0123}
    scalars |= {"mfu": None, "memory_allocated_gib": None, "skipped_steps": 0}
    line = step_line(20, scalars, eta_secs=3725)
    assert "loss 3.2500" in line and "tokens/s 12,345" in line and "ETA 1:02:05" in line and "data 12.3 ms" in line
    assert "MFU" not in line and "in use" not in line and "skipped" not in line
    assert "memory 1.00 GiB (0.50 in use)  skipped 2  ETA" in step_line(
        20, scalars | {"memory_allocated_gib": 0.5, "skipped_steps": 2}, eta_secs=1
    )
    assert "MFU 41.2%" in step_line(20, scalars | {"mfu": 0.412}, eta_secs=1)


def test_memory_on_the_cpu_is_the_resident_peak():
    memory = peak_memory(torch.device("cpu"))
    assert 0.01 < memory["memory_gib"] < 100 and memory["memory_allocated_gib"] is None


def test_memory_on_cuda_is_what_is_reserved_and_what_of_it_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 << 30)
    assert peak_memory(torch.device("cuda", 0)) == {"memory_gib": 3.0, "memory_allocated_gib": 2.0}
