"""scripts/bench/step_trace.py: a GPU's trace written by hand, and a real trace of this machine's CPU."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "step_trace.py"


@pytest.fixture(scope="module")
def step_trace():
    spec = importlib.util.spec_from_file_location("step_trace", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def event(name, ts, dur, cat, tid=1):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


def test_kernels_of_the_last_step_are_counted_by_kind_and_overlap_once(step_trace):
    events = [
        event("ProfilerStep#6", 0, 100, "user_annotation"),
        event("ProfilerStep#7", 1000, 10_000, "user_annotation"),
        event("nvjet_tst_128x256", 500, 200, "kernel"),  # of the step before
        event("nvjet_tst_128x256", 1000, 4000, "kernel", tid=7),
        event("sm90_xmma_gemm_bf16", 5000, 1000, "kernel", tid=7),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_bf16", 6000, 2000, "kernel", tid=7),
        event("ncclDevKernel_AllGather", 4000, 2000, "kernel", tid=9),  # at the same time as products
        event("Memcpy DtoH (Device -> Pageable)", 8000, 500, "gpu_memcpy", tid=7),
        event("triton_poi_fused_mul", 8500, 500, "kernel", tid=7),
        event("cudaStreamSynchronize", 9000, 100, "cuda_runtime"),
        event("cudaLaunchKernel", 9000, 5, "cuda_runtime"),
        {"ph": "i", "name": "an instant", "ts": 2000},
    ]
    found = step_trace.summarize({"traceEvents": events})
    assert found["step_ms"] == 10
    assert found["idle_share"] == pytest.approx(0.2)  # 1000 … 9000 of 1000 … 11000
    assert found["host_waits"] == {"cudaStreamSynchronize": 1}
    kinds = {"matrix products": 5, "attention": 2, "collectives": 2, "copies": 0.5, "other": 0.5}
    assert found["ms_by_kind"] == pytest.approx(kinds)
    assert found["attention_kernels"] == ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_bf16"]
    assert found["kernels"][0] == {"name": "nvjet_tst_128x256", "calls": 1, "ms": 4.0}


def test_self_times_of_a_cpus_operators_exclude_what_they_call(step_trace, tmp_path):
    a, b = torch.randn(300, 300), torch.randn(300, 300, requires_grad=True)

    def write(profiler):
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    cycle = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=cycle, on_trace_ready=write) as profiler:
        for _ in range(2):
            torch.matmul(a, b).relu().sum().backward()
            profiler.step()
    found = step_trace.summarize(json.loads((tmp_path / "trace.json").read_text()))
    operators = {operator["name"]: operator["ms"] for operator in found["operators"]}
    assert operators["aten::mm"] == pytest.approx(found["matrix_products_ms"]) and operators["aten::mm"] > 0
    assert operators["aten::matmul"] < operators["aten::mm"]  # which it calls
    assert all(ms >= -1e-3 for ms in operators.values())
    assert found["matrix_products_ms"] + found["other_operators_ms"] <= found["step_ms"] * 1.01


def test_a_trace_without_a_step_is_an_error(step_trace):
    with pytest.raises(ValueError, match="no ProfilerStep"):
        step_trace.summarize({"traceEvents": [event("aten::mm", 0, 1, "cpu_op")]})
