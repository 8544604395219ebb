"""Recorded numbers of whole estimates: a change of the code that changes a number is seen at once.

`python tests/unit/titan_tools/memory/test_estimate_golden.py` records the numbers of the installed torch again.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_tools.memory.command import estimate_from_command_line

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).parents[3] / "golden" / "memory_estimates.txt"
ABOUT = "# Written by tests/unit/titan_tools/memory/test_estimate_golden.py: case | torch | numbers of --json\n"
TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
PP, SCHEDULE = "--parallelism.pipeline_parallel_degree", "--parallelism.pipeline_parallel_schedule"
MICROBATCH, AC = "--parallelism.pipeline_parallel_microbatch_size", "--activation_checkpoint.mode"
SHARD, REPLICATE = "--parallelism.data_parallel_shard_degree=-1", "--parallelism.data_parallel_replicate_degree"
ONE_RANK_AXES = f"{SHARD} {TP}=1 {PP}=1 --training.mixed_precision_param=bfloat16"
EXPERTS = "--model.flavor=debugmodel_moe"
GPT_OSS = "--model.name=gpt_oss --model.flavor=debug_window --training.document_mask=none"
SCOUT = "--model.name=llama4 --model.flavor=debug_scout"
COMPILED = f"{ONE_RANK_AXES} --compile.enable --training.seq_len=256"
# case → preset, ranks, overrides
QUICK = {
    "dense, TP 2, full": ("debug", 4, f"{ONE_RANK_AXES} {TP}=2 {AC}=full"),
    "HSDP, accumulation": ("debug", 4, f"{ONE_RANK_AXES} {REPLICATE}=2 --training.global_batch_size=32"),
    "experts, FSDP 4": ("qwen3_debug", 4, f"{ONE_RANK_AXES} {CP}=1 {EXPERTS}"),
}
THOROUGH = {
    "tied, CP 2, foreach": ("qwen3_debug", 4, f"{ONE_RANK_AXES} {CP}=2 --optimizer.implementation=foreach"),
    "1F1B": ("debug", 4, f"{ONE_RANK_AXES} {PP}=2 {SCHEDULE}=1F1B {MICROBATCH}=1"),
    "fp32, TP 2, PP 2": ("debug", 8, ""),
    "DDP, plain loss": ("debug", 2, f"{ONE_RANK_AXES} {REPLICATE}=2 --training.loss=plain"),
    "CPU offload": ("debug", 2, f"{ONE_RANK_AXES} --training.enable_cpu_offload --optimizer.state_dtype=bfloat16"),
    "tied, PP 2": ("qwen3_debug", 4, f"{ONE_RANK_AXES} {PP}=2 {SCHEDULE}=GPipe {MICROBATCH}=1"),
    **{
        schedule: ("debug", 4, f"{ONE_RANK_AXES} {PP}=2 {SCHEDULE}={schedule} {MICROBATCH}=1 {AC}=none")
        for schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
    },
    "compiled, op": ("debug", 2, f"{COMPILED} {AC}=selective --activation_checkpoint.selective_ac_option=op"),
    "compiled, async TP": (
        "debug",
        2,
        f"{COMPILED} {TP}=2 --parallelism.enable_async_tensor_parallel --training.global_batch_size=-1",
    ),
    "compiled experts, op": (
        "qwen3_debug",
        2,
        f"{COMPILED} {CP}=1 {EXPERTS} {AC}=selective --activation_checkpoint.selective_ac_option=op",
    ),
    "GPT-OSS, EP 2": ("qwen3_debug", 4, f"{ONE_RANK_AXES} {CP}=1 {GPT_OSS} --parallelism.expert_parallel_degree=2"),
    "compiled GPT-OSS, TP 2": ("qwen3_debug", 2, f"{COMPILED} {CP}=1 {TP}=2 {GPT_OSS}"),
    "Scout's numbers, 1F1B of one microbatch": (
        "qwen3_debug",
        4,
        f"{ONE_RANK_AXES} {CP}=1 {SCOUT} {PP}=2 {SCHEDULE}=1F1B {MICROBATCH}=1 --training.local_batch_size=1",
    ),
    "compiled, float8": ("llama3_8b_float8", 2, f"{COMPILED} --training.local_batch_size=1"),
    "aot_eager, every 2nd layer": (
        "debug",
        2,
        f"{COMPILED} --compile.backend=aot_eager {AC}=selective --activation_checkpoint.selective_ac_option=2",
    ),
}
CASES = QUICK | THOROUGH
# Sentences, and what follows from the other numbers
LEFT_OUT = ("peak_at", "assumptions", "mesh", "usable_gib", "fits", "margin_gib", "margin_range_gib")
LEFT_OUT += ("peak", "activations_by_module_gib", "active_gib", "nvidia_smi_gib")
VERSION = ".".join(torch.__version__.split(".")[:2])


def numbers_of(preset: str, world_size: int, words: str) -> str:
    """The numbers of the JSON object on one line."""
    overrides = [*words.split(), "--validation.no_enable"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        estimate_from_command_line(preset, overrides, world_size=world_size, gpu_text=None, as_json=True)
    return json.dumps(_numbers(json.loads(printed.getvalue())), separators=(",", ":"))


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _numbers(one) for key, one in value.items() if key not in LEFT_OUT}
        return {key: one for key, one in kept.items() if one not in (0, {}, None)}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def recorded() -> dict[tuple[str, str], str]:
    """(case, version) → numbers."""
    lines = GOLDEN.read_text().splitlines() if GOLDEN.exists() else []
    cells = (line.split(" | ", 2) for line in lines if not line.startswith("#"))
    return {(case, version): numbers for case, version, numbers in cells}


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in THOROUGH)])
def test_numbers_are_those_recorded_for_this_torch(case):
    known = recorded().get((case, VERSION))
    if known is None:
        pytest.skip(f"no numbers are recorded for torch {VERSION}")
    assert numbers_of(*CASES[case]) == known


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = recorded() | {(case, VERSION): numbers_of(*settings) for case, settings in CASES.items()}
    GOLDEN.write_text(ABOUT + "".join(f"{case} | {version} | {said}\n" for (case, version), said in found.items()))
