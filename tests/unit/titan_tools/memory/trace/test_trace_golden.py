"""Peaks of traces with a GPU's kernels, as this version of torch has them: an upgrade that moves memory is seen.

`python tests/unit/titan_tools/memory/trace/test_trace_golden.py` writes this version's column anew.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.dist.training import Layout, args_of
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from trainer.job.job import resolve
from trainer.job.record import Job

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).parents[4] / "golden" / "memory_trace.txt"
TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
KEPT = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
RECOMPUTED = {"activation_checkpoint": {"mode": "full"}}
LAYOUTS = [
    Layout("one rank"),
    Layout("FSDP 2", 2),
    Layout("FSDP 8, operations kept", 8, {}, {}, KEPT),
    Layout("HSDP 2 x 2, full recomputation", 4, {"data_parallel_replicate_degree": 2}, {}, RECOMPUTED),
    Layout("FSDP 2 x TP 2", 4, {TP: 2}, {}, KEPT),
    Layout("FSDP 2 x CP 2, foreach", 4, {CP: 2}, {}, {"optimizer": {"implementation": "foreach"}}),
    Layout("FSDP 2, plain loss", 2, {}, {"loss": "plain"}, KEPT),
    Layout("FSDP 2 x PP 2", 4, {PP: 2, "pipeline_parallel_microbatch_size": 1}, {}, KEPT),
]
# Each axis and way to recompute; the others are covered by these, piece by piece
SLOW = ("one rank", "FSDP 2", "FSDP 2, plain loss")
VERSION = ".".join(torch.__version__.split(".")[:2])


def peaks_of(layout: Layout) -> str:
    """Bytes of the first rank: held at the peak of a steady step, and asked for in it, one block after another."""
    tiny = {"seq_len": 512, "local_batch_size": 8, "mixed_precision_param": "bfloat16"}
    config = replace(layout, training=tiny | layout.training).config("debug_gqa")
    args, dims = replace(args_of("debug_gqa"), num_layers=2), resolve(config.parallelism, layout.world_size)
    trace = capture(Job.of(config, args, dims), rank=0, kernels=Kernels("cuda", "flash", "fused"))
    asked = sum(block.num_bytes for block in trace.blocks if block.point.step == 2)
    return f"{trace.peak_bytes(steps=range(2, 3))} {asked}"


def read() -> dict[tuple[str, str], str]:
    """(layout, version) → peaks."""
    found = {}
    for line in GOLDEN.read_text().splitlines():
        if line and not line.startswith("#"):
            layout, version, peaks = (word.strip() for word in line.split("|"))
            found[layout, version] = peaks
    return found


def write(describe: Callable[[Layout], str]) -> None:
    """Add this version's peaks to the file."""
    found = read() if GOLDEN.exists() else {}
    found |= {(layout.name, VERSION): describe(layout) for layout in LAYOUTS}
    order = [layout.name for layout in LAYOUTS]
    lines = [f"{name:32} | {version} | {peaks}" for (name, version), peaks in found.items()]
    lines.sort(key=lambda line: (order.index(line.split("|")[0].strip()), line))
    about = "# Written by tests/unit/titan_tools/memory/trace/test_trace_golden.py. Of the first rank, a steady step:"
    GOLDEN.write_text("\n".join([about, "# layout | torch | bytes held at the peak, bytes asked for", *lines, ""]))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name in SLOW)) for each in LAYOUTS],
)
def test_peaks_are_those_recorded_for_this_torch(layout):
    recorded = read().get((layout.name, VERSION))
    assert recorded is not None, f"none are recorded for torch {VERSION}: look at what has moved, then write them"
    assert peaks_of(layout) == recorded


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(peaks_of)
