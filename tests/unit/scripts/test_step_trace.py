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


def launched(name, at, ts, dur, cat="kernel", tid=7):
    """A kernel, and the call that launched it."""
    args = {"correlation": round(at * 10)}
    return [
        event("cudaLaunchKernel", at, 5, "cuda_runtime") | {"args": args},
        event(name, ts, dur, cat, tid) | {"args": args},
    ]


def test_kernels_of_the_last_step_are_counted_by_kind_and_overlap_once(step_trace):
    """A step's update runs when the host is in the next step: it belongs to the step that launched it."""
    attention = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_bf16"
    events = [
        event("ProfilerStep#6", 0, 100, "user_annotation"),
        event("ProfilerStep#7", 1000, 10_000, "user_annotation"),
        *launched("multi_tensor_apply_kernel<FusedAdam>", 90, 1000, 2000),  # of the step before
        *launched("nvjet_tst_128x256", 1001, 3000, 4000),
        *launched("sm90_xmma_gemm_bf16", 1002, 7000, 1000),
        *launched(attention, 1003, 8000, 2000),
        *launched("ncclDevKernel_AllGather", 1004, 6000, 2000, tid=9),  # at the same time as products
        *launched("Memcpy DtoH (Device -> Pageable)", 1005, 10_000, 500, "gpu_memcpy"),
        *launched("triton_poi_fused_mul", 1006, 10_500, 500),
        *launched("multi_tensor_apply_kernel<FusedAdam>", 1007, 11_500, 1500),
        event("cudaStreamSynchronize", 9000, 100, "cuda_runtime"),
        {"ph": "i", "name": "an instant", "ts": 2000},
    ]
    found = step_trace.summarize({"traceEvents": events})
    assert found["step_ms"] == 10  # 3000 … 13000
    assert found["idle_share"] == pytest.approx(0.05)  # 11000 … 11500
    assert found["host_waits"] == {"cudaStreamSynchronize": 1}
    kinds = {"matrix products": 5, "attention": 2, "collectives": 2, "optimizer": 1.5, "copies": 0.5, "other": 0.5}
    assert found["ms_by_kind"] == pytest.approx(kinds)
    assert found["attention_kernels"] == [attention]
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
