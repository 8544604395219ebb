"""Summarize a step from a torch.profiler trace: kernels, idle share, host waits; on a CPU, time by operator.

python scripts/bench/step_trace.py run/profile_traces/iteration_20/rank0_trace.json

The step is the trace's last `ProfilerStep#N`. On a GPU it is all that this step of the host launched, from its first
kernel to the end of its last: the update's kernels run when the host is already in the next step, or stops recording.
Time by kind of kernel, the 30 longest kernels, the attention kernels, the share of the step in which no kernel runs,
and the calls in which the host waits for the GPU. On a CPU: the self time of each operator over all threads, and the
time outside of matrix products.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NUM_KERNELS = 30
KINDS = (  # the first that matches a kernel's name
    ("attention", r"fmha|flash_fwd|flash_bwd|sdpa|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|xmma"),
    ("collectives", r"nccl"),
    ("optimizer", r"adam|multi_tensor_apply"),
    ("copies", r"memcpy|memset"),
)
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
PRODUCTS = re.compile(r"aten::(_scaled_)?(mm|addmm|bmm|baddbmm|_grouped_mm)$|mkldnn.*(linear|matmul)|attention")


def summarize(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Times in milliseconds. Raises ValueError if the trace contains no step."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    if not steps:
        raise ValueError("the trace contains no ProfilerStep event: record it with titan train's profiling section")
    step = max(steps, key=lambda event: event["ts"])
    start, end = step["ts"], step["ts"] + step["dur"]
    inside = [event for event in events if start <= event["ts"] < end]
    launches = {_correlation(event) for event in inside if event.get("cat") in ("cuda_runtime", "cuda_driver")} - {None}
    of_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_gpu = [event for event in of_gpu if _correlation(event) in launches]
    if of_gpu and not on_gpu:
        raise ValueError(f"{step['name']} launched none of the trace's {len(of_gpu)} kernels")
    return _gpu(inside, on_gpu) if on_gpu else {"step_ms": step["dur"] / 1e3} | _cpu(inside)


def _correlation(event: Mapping[str, Any]) -> int | None:
    """The number that a kernel and the call that launched it have in common."""
    number: int | None = event.get("args", {}).get("correlation")
    return number


def _gpu(inside: list[dict[str, Any]], on_gpu: list[dict[str, Any]]) -> dict[str, Any]:
    start, end = min(event["ts"] for event in on_gpu), max(event["ts"] + event["dur"] for event in on_gpu)
    by_kind: Counter[str] = Counter()
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in on_gpu:
        by_kind[_kind(event["name"])] += event["dur"] / 1e3
        by_name[event["name"]].append(event["dur"] / 1e3)
    busy = _covered((event["ts"], event["ts"] + event["dur"]) for event in on_gpu)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    waits = Counter(event["name"] for event in inside if event.get("cat") == "cuda_runtime")
    return {
        "step_ms": (end - start) / 1e3,
        "idle_share": 1 - busy / (end - start),
        "host_waits": {name: waits[name] for name in HOST_WAITS if waits[name]},
        "ms_by_kind": dict(by_kind.most_common()),
        "attention_kernels": sorted({name for name in by_name if _kind(name) == "attention"}),
        "kernels": [{"name": name, "calls": len(ms), "ms": sum(ms)} for name, ms in longest[:NUM_KERNELS]],
    }


def _kind(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union: kernels of several streams overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _cpu(inside: list[dict[str, Any]]) -> dict[str, Any]:
    self_ms: Counter[str] = Counter()
    threads = defaultdict(list)
    for event in inside:
        if event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
    for events in threads.values():
        open_ops: list[tuple[float, str]] = []  # end and name of the operators around the current one
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_ops and event["ts"] >= open_ops[-1][0]:
                open_ops.pop()
            if open_ops:
                self_ms[open_ops[-1][1]] -= event["dur"] / 1e3
            self_ms[event["name"]] += event["dur"] / 1e3
            open_ops.append((event["ts"] + event["dur"], event["name"]))
    products = sum(ms for name, ms in self_ms.items() if PRODUCTS.search(name))
    operators = sum(self_ms.values())
    return {
        "matrix_products_ms": products,
        "other_operators_ms": operators - products,
        "operators": [{"name": name, "ms": ms} for name, ms in self_ms.most_common(NUM_KERNELS)],
    }


def print_summary(summary: Mapping[str, Any]) -> None:
    print(f"step {summary['step_ms']:.1f} ms", end="")
    if "idle_share" in summary:
        waits = ", ".join(f"{count} × {name}" for name, count in summary["host_waits"].items()) or "none"
        print(f"; no kernel runs in {summary['idle_share']:.1%}; host waits: {waits}")
        print("  ".join(f"{kind} {ms:.1f} ms" for kind, ms in summary["ms_by_kind"].items()))
        print("attention kernels: " + (", ".join(summary["attention_kernels"]) or "none"))
        for kernel in summary["kernels"]:
            print(f"{kernel['ms']:9.2f} ms {kernel['calls']:6} ×  {kernel['name'][:100]}")
        return
    products, others = summary["matrix_products_ms"], summary["other_operators_ms"]
    print(f"; matrix products and attention {products:.1f} ms, other operators {others:.1f} ms")
    for operator in summary["operators"][:10]:
        print(f"{operator['ms']:9.2f} ms  {operator['name']}")


if __name__ == "__main__":
    print_summary(summarize(json.loads(Path(sys.argv[1]).read_text())))
