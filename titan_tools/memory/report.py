"""Print an estimate: tables of the pipeline ranks, the peak's parts and the verdicts; or one JSON object."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converters.common.sizes import GIB, format_bytes
from converters.layout.mesh_shape import AXES, DEGREES
from titan_tools.memory.estimate import Estimate, RankEstimate, UnevenEstimate
from titan_tools.memory.replay.replay import Peak
from titan_tools.memory.replay.timeline import draw_timeline
from titan_tools.memory.trace.events import PARTS, StepPoint
from titan_tools.memory.verdict import FITS, Verdict
from titan_tools.terminal.console import count, table
from trainer.models.objectives import get_objective

_PHASES = {
    "build": "when the model is built",
    "states": "when optimizer states are created",
    "reduce": "when a pipeline step's gradients are reduced",
    "reduced": "when a pipeline step's gradients are reduced",
    "clip": "when gradients are clipped",
    "optimizer": "in the optimizer's update",
    "zero_grad": "when gradients are freed",
    "validation": "in validation",
}
_OF_MICROBATCHES = {
    "weight": "weights' gradients",
    "receive_input": "input",
    "receive_gradient": "output's gradient",
    "output_sent": "sent output",
    "gradient_sent": "sent gradient",
}
_MODULES = {
    "": "the model",
    "output": "the output and the loss",
    "loss": "the loss",
    "norm": "the last norm",
    "tok_embeddings": "the embedding",
}


def in_words(point: StepPoint) -> str:
    """A point of the step in words, such as `backward of layers.31, microbatch 2 of stage 1`; counted from 0."""
    if point.phase in _PHASES:
        return _PHASES[point.phase]
    what = _OF_MICROBATCHES.get(point.phase, point.phase)
    text = f"{what} of {_MODULES.get(point.module, point.module)}"
    if point.microbatch > 0 or point.stage > 0:
        text += f", microbatch {point.microbatch}"
    return f"{text} of stage {point.stage}" if point.stage > 0 else text


LABELS = {
    "parameters": "parameters (shards)",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations kept",
    "recompute": "tensors of backward",
    "logits_and_loss": "logits and loss",
    "all_gather": "gathered parameters",
    "reduce_scatter": "reduce-scatter",
    "pipeline_buffers": "pipeline buffers",
    "workspaces": "kernel workspaces",
    "other": "other",
}
_LEAST_SHARE = 0.01  # of reserved memory, that expandable segments must save to be suggested


def show(estimate: Estimate) -> None:
    """Print the whole page."""
    print(f"{headline(estimate)}\n\nPeaks per pipeline rank, GiB, under the {estimate.allocator} allocator")
    table(
        ("pp rank", "allocated", "reserved", "nvidia-smi", "step 1 allocated", "step 1 reserved", "peak at"),
        _rank_rows(estimate.ranks),
    )
    worst, peak = estimate.worst_rank, estimate.worst_rank.worst
    print(f"\nThe peak, pp rank {worst.pp_rank}: {in_words(peak.point)}")
    rows = _breakdown_rows(peak, symmetric_bytes=estimate.fullest.trace.symmetric_bytes)
    table(("what", "GiB", "share of allocated"), rows)
    if peak.activations_by_module:
        print("\nActivations by module")
        table(("module", "GiB each", "GiB"), _module_rows(peak.activations_by_module))
    if estimate.uneven:
        print("\nThe fullest rank if its experts receive more rows than the mean of all ranks, GiB")
        table(("rows over the mean", "pp rank", "allocated", "reserved", "nvidia-smi", ""), _uneven_rows(estimate))
    print("\nVerdict")
    table(
        ("GPU", "usable GiB", "needs GiB", "margin GiB", "verdict"),
        [_verdict_row(verdict) for verdict in estimate.verdicts],
    )
    saved = estimate.fullest_rank.reserved_bytes - estimate.other_reserved_bytes
    if estimate.allocator == "classic" and saved >= _LEAST_SHARE * estimate.fullest_rank.reserved_bytes:
        print(f"\nPYTORCH_ALLOC_CONF=expandable_segments:True would reserve {format_bytes(saved)} less")
    print("\nAssumptions")
    for line in estimate.assumptions:
        print(f"- {line}")


def draw(estimate: Estimate, picture: Path) -> None:
    """Draw a step of the fullest rank, with the capacity of the GPU type that was given, or the smallest it fits."""
    rank = estimate.fullest_rank
    by_size = sorted(estimate.verdicts, key=lambda verdict: verdict.gpu.usable_gib)
    gpu = next((verdict.gpu for verdict in by_size if verdict.verdict == FITS), by_size[-1].gpu)
    draw_timeline(
        estimate.fullest,
        picture,
        title=f"{estimate.job.family.name} on {estimate.job.dims}, pp rank {rank.pp_rank}",
        peak_at=in_words(rank.steady.point),
        limit=(gpu.name, round(gpu.usable_gib * GIB)),
        labels=LABELS,
    )


def headline(estimate: Estimate) -> str:
    """What was estimated, in a line."""
    job = estimate.job
    size = get_objective(job.family.name).units_per_sample(job)
    sequence = f" sequence {size}," if size > 1 else ""
    return (
        f"{job.family.name}, {job.num_parameters:,} parameters, on {count(job.dims.world_size, 'rank')} ({job.dims});"
        f"{sequence} a step of"
        f" {count(job.num_microbatches * job.num_accumulated, 'forward')}, {count(job.microbatch_size, 'sample')} each"
    )


def as_json(estimate: Estimate) -> dict[str, Any]:
    """The object of `--json`."""
    worst = estimate.worst_rank
    per_rank = [_view(rank, rank.worst) for rank in estimate.ranks]
    return {
        "world_size": estimate.job.dims.world_size,
        "mesh": {axis: getattr(estimate.job.dims, axis) for axis in (DEGREES if estimate.job.dims.ep > 1 else AXES)},
        "allocator": estimate.allocator,
        "per_rank": per_rank,
        "peak": {
            **{name: max(view[name] for view in per_rank) for name in ("allocated_gib", "active_gib", "reserved_gib")},
            "nvidia_smi_gib": _rounded(max(rank.nvidia_smi_gib for rank in estimate.ranks)),
            "pp_rank": worst.pp_rank,
            "peak_at": in_words(worst.worst.point),
            "breakdown_gib": _breakdown(worst.worst),
        },
        "step1": [_view(rank, rank.step1) for rank in estimate.ranks],
        "steady": [_view(rank, rank.steady) for rank in estimate.ranks],
        "symmetric_memory_gib": gib(estimate.fullest.trace.symmetric_bytes),
        "other_allocator_reserved_gib": gib(estimate.other_reserved_bytes),
        "verdicts": {verdict.gpu.name: _verdict(verdict) for verdict in estimate.verdicts},
        "assumptions": list(estimate.assumptions),
        **({"uneven": [_uneven(each) for each in estimate.uneven]} if estimate.uneven else {}),
    }


def _uneven(each: UnevenEstimate) -> dict[str, Any]:
    view = _view(each.rank, each.rank.worst)
    names = ("pp_rank", "allocated_gib", "reserved_gib", "nvidia_smi_gib", "peak_at")
    return {"imbalance": each.imbalance, "is_judged": each.is_judged} | {name: view[name] for name in names}


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 4)


def _view(rank: RankEstimate, peak: Peak) -> dict[str, Any]:
    return {
        "pp_rank": rank.pp_rank,
        "allocated_gib": gib(peak.allocated_bytes),
        "active_gib": gib(peak.allocated_bytes),  # with NCCL, since torch 2.8, no freed block waits for another stream
        "reserved_gib": gib(peak.reserved_bytes),
        "nvidia_smi_gib": _rounded(rank.nvidia_smi_gib),
        "peak_at": in_words(peak.point),
        "breakdown_gib": _breakdown(peak),
        "activations_by_module_gib": {name: gib(size) for name, size in peak.activations_by_module.items()},
    }


def _breakdown(peak: Peak) -> dict[str, float]:
    """All parts. Without the last two they add up to what is allocated, with them to what is reserved."""
    parts = {part: gib(peak.by_part.get(part, 0)) for part in PARTS}
    return parts | {"idle_pools": gib(peak.idle_pools_bytes), "fragmentation": gib(peak.fragmentation_bytes)}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    low, high = verdict.margin_gib
    return {
        "fits": {"fits": True, "does not fit": False}.get(verdict.verdict),
        "verdict": verdict.verdict,
        "margin_gib": round(low, 2),
        "margin_range_gib": [round(low, 2), round(high, 2)],
        "needed_gib": _rounded(verdict.needed_gib),
        "usable_gib": verdict.gpu.usable_gib,
    }


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(size, 2) for size in interval]


def _rank_rows(ranks: Sequence[RankEstimate]) -> list[tuple[Any, ...]]:
    digits = _digits(max(rank.reserved_bytes for rank in ranks))
    return [
        (
            rank.pp_rank,
            _gib(rank.steady.allocated_bytes, digits),
            _gib(rank.steady.reserved_bytes, digits),
            "{:.1f} … {:.1f}".format(*rank.nvidia_smi_gib),
            _gib(rank.step1.allocated_bytes, digits),
            _gib(rank.step1.reserved_bytes, digits),
            in_words(rank.worst.point),
        )
        for rank in ranks
    ]


def _uneven_rows(estimate: Estimate) -> list[tuple[Any, ...]]:
    digits = _digits(max(each.rank.reserved_bytes for each in estimate.uneven))
    worst = max(each.imbalance for each in estimate.uneven)
    words = {1.0: "balanced: the tables above", worst: "the worst case: all tokens choose this rank's experts"}
    return [
        (
            f"{each.imbalance:.4g}",
            each.rank.pp_rank,
            _gib(each.rank.worst.allocated_bytes, digits),
            _gib(each.rank.reserved_bytes, digits),
            "{:.1f} … {:.1f}".format(*each.rank.nvidia_smi_gib),
            "; ".join(filter(None, (words.get(each.imbalance), "in the verdict" if each.is_judged else None))),
        )
        for each in estimate.uneven
    ]


def _breakdown_rows(peak: Peak, *, symmetric_bytes: int) -> list[tuple[str, str, str]]:
    """A row per part of the peak, largest first; then the sums, and what is outside of the allocator."""
    digits = _digits(peak.reserved_bytes)
    rows = [
        (label, size, f"{size / peak.allocated_bytes:.0%}")
        for part, label in LABELS.items()
        if (size := peak.by_part.get(part, 0)) >= peak.allocated_bytes / 2000
    ]
    rows.sort(key=lambda row: -row[1])
    rows += [
        ("= allocated", peak.allocated_bytes, "100%"),
        ("idle in pools of other streams", peak.idle_pools_bytes, ""),
        ("fragmentation", peak.fragmentation_bytes, ""),
        ("= reserved", peak.reserved_bytes, ""),
    ]
    if symmetric_bytes:
        rows.append(("symmetric memory, in addition", symmetric_bytes, ""))
    return [(what, _gib(size, digits), share) for what, size, share in rows]


def _module_rows(by_module: dict[str, int]) -> list[tuple[str, str, str]]:
    """A row per run of consecutive layers whose shown numbers are equal."""
    digits = _digits(sum(by_module.values()))
    rows: list[tuple[str, str, int, int]] = []  # first and last, bytes of all, number
    for fqn, size in by_module.items():
        name = fqn or "batch, positions"
        if rows and name.startswith("layers.") and rows[-1][0].startswith("layers."):
            first, _, total, number = rows[-1]
            if _gib(total // number, digits) == _gib(size, digits):
                rows[-1] = (first, name, total + size, number + 1)
                continue
        rows.append((name, name, size, 1))
    return [
        (first if first == last else f"{first} … {last}", _gib(total // number, digits), _gib(total, digits))
        for first, last, total, number in rows
    ]


def _verdict_row(verdict: Verdict) -> tuple[str, str, str, str, str]:
    return (
        verdict.gpu.name,
        f"{verdict.gpu.usable_gib:.2f}",
        "{:.1f} … {:.1f}".format(*verdict.needed_gib),
        "{:+.1f} … {:+.1f}".format(*verdict.margin_gib),
        verdict.verdict,
    )


def _digits(num_bytes: int) -> int:
    """Decimal places for GiB in a table whose largest entry this is."""
    return 2 if num_bytes >= GIB else 5


def _gib(num_bytes: int, digits: int) -> str:
    return f"{num_bytes / GIB:.{digits}f}"
