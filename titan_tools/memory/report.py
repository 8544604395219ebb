"""An estimate in words: tables of the pipeline ranks, the peak's parts and the verdicts; or as one JSON object."""

from typing import Any

from titan_tools.console import count
from titan_tools.memory.constants import GIB
from titan_tools.memory.estimate import Estimate
from titan_tools.memory.formula.closed_form import PARTS, Instant
from titan_tools.memory.verdict import Verdict

LABELS = {
    "parameters": "parameters (shards)",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations kept",
    "recompute": "one block's backward",
    "logits_and_loss": "logits and loss",
    "all_gather": "gathered parameters",
    "reduce_scatter": "reduce-scatter input",
    "pipeline_buffers": "pipeline buffers",
    "workspaces": "cuBLAS workspaces",
}


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 4)


def headline(found: Estimate) -> str:
    """What was estimated, in a line."""
    run = found.run
    size = run.family.num_parameters(run.args)
    return (
        f"{run.family.name}, {size:,} parameters, on {count(run.mesh.world_size, 'rank')} ({run.mesh});"
        f" sequence {run.seq_len}, a step of {count(run.num_microbatches * run.num_accumulated, 'forward')},"
        f" {count(run.microbatch_size, 'sample')} each"
    )


def rank_rows(found: Estimate) -> list[tuple[Any, ...]]:
    """A row per pipeline rank: allocated peaks, when the larger one is, and what a rank holds for good."""
    rows = []
    for rank in found.ranks:
        worst = rank.worst
        held = sum(worst.parts.get(part, 0) for part in ("parameters", "optimizer"))
        rows.append(
            (
                rank.pp_rank,
                _text(rank.step1.total_bytes),
                _text(rank.steady.total_bytes),
                _text(held),
                _text(worst.parts.get("activations", 0) + worst.parts.get("recompute", 0)),
                worst.when,
            )
        )
    return rows


RANK_COLUMNS = ("pp rank", "step 1 GiB", "later GiB", "params+optimizer", "activations", "peak at")


def breakdown_rows(instant: Instant) -> list[tuple[str, str, str]]:
    """A row per part of the peak instant, largest first."""
    parts = sorted(instant.parts.items(), key=lambda item: -item[1])
    return [(LABELS[name], _text(size), f"{size / instant.total_bytes:.0%}") for name, size in parts]


def verdict_rows(found: Estimate) -> list[tuple[str, str, str, str, str]]:
    """A row per GPU type."""
    return [
        (
            verdict.gpu.name,
            f"{verdict.gpu.usable_gib:.2f}",
            "{:.1f} … {:.1f}".format(*verdict.needed_gib),
            "{:+.1f} … {:+.1f}".format(*verdict.margin_gib),
            verdict.verdict,
        )
        for verdict in found.verdicts
    ]


VERDICT_COLUMNS = ("GPU", "usable GiB", "needs GiB", "margin GiB", "verdict")


def as_json(found: Estimate) -> dict[str, Any]:
    """The object of `--json`. Fields that the closed form cannot fill are null: active, reserved."""
    worst = found.worst_rank
    return {
        "engine": "closed form",
        "world_size": found.run.mesh.world_size,
        "mesh": {axis: getattr(found.run.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")},
        "per_rank": [_view(rank.pp_rank, rank.worst) for rank in found.ranks],
        "peak": _view(worst.pp_rank, worst.worst),
        "step1": [_view(rank.pp_rank, rank.step1) for rank in found.ranks],
        "steady": [_view(rank.pp_rank, rank.steady) for rank in found.ranks],
        "verdicts": {verdict.gpu.name: _verdict(verdict) for verdict in found.verdicts},
        "assumptions": list(found.assumptions),
        "covers": list(found.covers),
    }


def _view(pp_rank: int, instant: Instant) -> dict[str, Any]:
    return {
        "pp_rank": pp_rank,
        "allocated_gib": gib(instant.total_bytes),
        "active_gib": None,
        "reserved_gib": None,
        "nvidia_smi_gib": None,
        "peak_at": instant.when,
        "breakdown_gib": {part: gib(instant.parts.get(part, 0)) for part in PARTS},
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    low, high = verdict.margin_gib
    fits = {"fits": True, "does not fit": False}.get(verdict.verdict)
    return {
        "fits": fits,
        "verdict": verdict.verdict,
        "margin_gib": round(low, 2),
        "margin_range_gib": [round(low, 2), round(high, 2)],
        "needed_gib": [round(size, 2) for size in verdict.needed_gib],
        "usable_gib": verdict.gpu.usable_gib,
    }


def _text(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB / 10 else f"{num_bytes / GIB:.5f}"
