"""Measure what the device reaches at most: matrix products, a copy, and which attention kernel torch chooses.

python scripts/bench/ceilings.py              on a GPU: 8192³ and the shapes of 8B, in bf16 and float8
python scripts/bench/ceilings.py --on cpu     small shapes in fp32 and bf16

Inputs are random (zeros multiply faster). Each line is one reading: the median of `--repeats` calls.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from rounds import machine  # noqa: E402

_TOKENS, _DIM, _HIDDEN, _VOCAB = 16384, 4096, 14336, 128256  # of 8B: batch 2 × sequence 8192
GPU_SHAPES = [(8192, 8192, 8192), (_TOKENS, _DIM, _HIDDEN), (_TOKENS, _HIDDEN, _DIM), (_TOKENS // 8, _DIM, _VOCAB)]
CPU_SHAPES = [(2048, 2048, 2048), (2048, 256, 768)]
ATTENTION_KERNELS = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}  # torch.nn.attention.SDPBackend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    chosen = parser.parse_args()
    device = torch.device(chosen.on)
    _print({"machine": machine(Path.cwd()), "torch": torch.__version__})
    is_gpu = device.type == "cuda"
    for shape in GPU_SHAPES if is_gpu else CPU_SHAPES:
        for dtype in (torch.bfloat16,) if is_gpu else (torch.float32, torch.bfloat16):
            _print(product(shape, dtype, device, chosen.repeats))
        if is_gpu and torch.cuda.get_device_capability() >= (8, 9):
            _print(float8_product(shape, device, chosen.repeats))
    _print(copy(1 << (32 if is_gpu else 26), device, chosen.repeats))
    if is_gpu:
        _print(attention(device, chosen.repeats))


def product(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """[M, K] × [K, N], the second in the layout of a weight."""
    m, k, n = shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    secs = _time(lambda: F.linear(a, b), device, repeats)
    return {"what": f"{dtype} {m} × {k} × {n}", "tflops": 2 * m * k * n / secs / 1e12}


def float8_product(shape: tuple[int, int, int], device: torch.device, repeats: int) -> dict[str, Any]:
    m, k, n = shape
    a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    secs = _time(
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True), device, repeats
    )
    return {"what": f"float8 {m} × {k} × {n}", "tflops": 2 * m * k * n / secs / 1e12}


def copy(num_bytes: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Bytes read and written."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"what": "copy", "gb_per_sec": 2 * num_bytes / _time(lambda: target.copy_(source), device, repeats) / 1e9}


def attention(device: torch.device, repeats: int) -> dict[str, Any]:
    """The kernel that titan's settings choose for 8B's shapes, and its speed."""
    from trainer.parallel.attention_backend import attention_backends

    q = torch.randn(2, 32, 8192, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 8, 8192, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    with attention_backends(device):
        kernel = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
        secs = _time(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), device, repeats)
    return {
        "what": "attention forward, 2 × 32 heads (8 of keys) × 8192 × 128",
        "kernel": ATTENTION_KERNELS.get(kernel, str(kernel)),
        "tflops": 4 * 2 * 32 * 8192**2 * 128 / 2 / secs / 1e12,
    }


def _time(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after three that do not count."""
    secs = []
    for number in range(3 + repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            taken = start.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            call()
            taken = time.perf_counter() - started
        if number >= 3:
            secs.append(taken)
    return median(secs)


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
