"""Print an estimate: tables of the pipeline ranks, the peak's parts and the verdicts; or one JSON object."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converters.common.sizes import GIB, format_bytes
from converters.layout.mesh_shape import AXES, DEGREES
from titan_tools.memory.constants import ENGINES_AGREE, PARTS
from titan_tools.memory.estimate import Estimate, RankEstimate, UnevenEstimate
from titan_tools.memory.replay.replay import Peak
from titan_tools.memory.replay.timeline import draw_timeline
from titan_tools.memory.trace.events import StepPoint
from titan_tools.memory.verdict import FITS, Verdict
from titan_tools.terminal.console import count, table

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
_LEAST_SHARE = 0.01  # of reserved memory, that the other allocator must save to be suggested


def show(found: Estimate) -> None:
    """Print the whole page."""
    print(f"{headline(found)}\n\nPeaks per pipeline rank, GiB, under the {found.allocator} allocator")
    table(
        ("pp rank", "allocated", "reserved", "nvidia-smi", "step 1 allocated", "step 1 reserved", "peak at"),
        _rank_rows(found.ranks),
    )
    worst, peak = found.worst_rank, found.worst_rank.worst
    print(f"\nThe peak, pp rank {worst.pp_rank}: {in_words(peak.point)}")
    rows = _breakdown_rows(worst, peak, symmetric_bytes=found.fullest.trace.symmetric_bytes)
    table(("what", "GiB", "share of allocated", "closed form"), rows)
    if peak.activations_by_module:
        print("\nActivations by module")
        table(("module", "GiB each", "GiB"), _module_rows(peak.activations_by_module))
    if found.uneven:
        print("\nThe fullest rank if its experts receive more rows than the mean of all ranks, GiB")
        table(("rows over the mean", "pp rank", "allocated", "reserved", "nvidia-smi", ""), _uneven_rows(found))
    print("\nVerdict")
    table(
        ("GPU", "usable GiB", "needs GiB", "margin GiB", "verdict"),
        [_verdict_row(verdict) for verdict in found.verdicts],
    )
    for title, lines in (
        ("The two engines", engine_lines(found)),
        ("Changes that save memory, each alone", advice_lines(found)),
        ("Assumptions", found.assumptions),
    ):
        if lines:
            print(f"\n{title}")
            for line in lines:
                print(f"- {line}")


def draw(found: Estimate, picture: Path) -> None:
    """Draw a step of the fullest rank, with the capacity of the GPU type that was given, or the smallest it fits."""
    rank = found.fullest_rank
    by_size = sorted(found.verdicts, key=lambda verdict: verdict.gpu.usable_gib)
    gpu = next((verdict.gpu for verdict in by_size if verdict.verdict == FITS), by_size[-1].gpu)
    draw_timeline(
        found.fullest,
        picture,
        title=f"{found.job.family.name} on {found.job.dims}, pp rank {rank.pp_rank}",
        limit=(gpu.name, round(gpu.usable_gib * GIB)),
        labels=LABELS,
    )


def headline(found: Estimate) -> str:
    """What was estimated, in a line."""
    job = found.job
    return (
        f"{job.family.name}, {job.num_parameters:,} parameters, on {count(job.dims.world_size, 'rank')} ({job.dims});"
        f" sequence {job.config.training.seq_len}, a step of"
        f" {count(job.num_microbatches * job.num_accumulated, 'forward')}, {count(job.microbatch_size, 'sample')} each"
    )


def engine_lines(found: Estimate) -> list[str]:
    """How far the trace and the closed form differ, in allocated memory of a steady step."""
    if found.formula_gaps:
        return [f"trace only; the closed form does not describe {reason}" for reason in found.formula_gaps]
    far = found.disagreeing
    if not far:
        most = max(abs(rank.engines_differ_by or 0) for rank in found.ranks)
        return [f"the traced train step and the closed form agree to {max(most, 0.001):.1%} of what is allocated"]
    return [
        f"pp rank {rank.pp_rank}: WARNING: the closed form gives {_gib(rank.formula.total_bytes)} GiB allocated,"
        f" {rank.engines_differ_by:+.1%} relative to the trace (limit {ENGINES_AGREE:.0%}), most of it in"
        f" {LABELS[_farthest_part(rank)]}; one of them is wrong: please report this config"
        for rank in far
        if rank.formula
    ]


def advice_lines(found: Estimate) -> list[str]:
    """What would save memory: the other allocator, as replayed, and changes of the config, by the closed form."""
    rank = found.fullest_rank
    saved = rank.reserved_bytes - found.other_reserved_bytes
    lines = [str(change) for change in found.changes]
    if found.allocator == "classic" and saved >= _LEAST_SHARE * rank.reserved_bytes:
        lines.insert(0, f"PYTORCH_ALLOC_CONF=expandable_segments:True: {format_bytes(saved)} less reserved")
    return lines


def as_json(found: Estimate) -> dict[str, Any]:
    """The object of `--json`."""
    worst = found.worst_rank
    per_rank = [_view(rank, rank.worst) for rank in found.ranks]
    return {
        "world_size": found.job.dims.world_size,
        "mesh": {axis: getattr(found.job.dims, axis) for axis in (DEGREES if found.job.dims.ep > 1 else AXES)},
        "allocator": found.allocator,
        "per_rank": per_rank,
        "peak": {
            **{name: max(view[name] for view in per_rank) for name in ("allocated_gib", "active_gib", "reserved_gib")},
            "nvidia_smi_gib": _rounded(max(rank.nvidia_smi_gib for rank in found.ranks)),
            "pp_rank": worst.pp_rank,
            "peak_at": in_words(worst.worst.point),
            "breakdown_gib": _breakdown(worst.worst),
        },
        "step1": [_view(rank, rank.step1) for rank in found.ranks],
        "steady": [_view(rank, rank.steady) for rank in found.ranks],
        "symmetric_memory_gib": gib(found.fullest.trace.symmetric_bytes),
        "other_allocator_reserved_gib": gib(found.other_reserved_bytes),
        "verdicts": {verdict.gpu.name: _verdict(verdict) for verdict in found.verdicts},
        "changes": [{"words": c.words, "saves_gib": gib(c.saved_bytes)} for c in found.changes],
        "closed_form": {
            "covers": not found.formula_gaps,
            "gaps": list(found.formula_gaps),
            "allocated_gib": [gib(rank.formula.total_bytes) if rank.formula else None for rank in found.ranks],
            "differs_by": [rank.engines_differ_by for rank in found.ranks],
            "agrees": None if found.formula_gaps else not found.disagreeing,
        },
        "assumptions": list(found.assumptions),
        **({"uneven": [_uneven(each) for each in found.uneven]} if found.uneven else {}),
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


def _uneven_rows(found: Estimate) -> list[tuple[Any, ...]]:
    digits = _digits(max(each.rank.reserved_bytes for each in found.uneven))
    worst = max(each.imbalance for each in found.uneven)
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
        for each in found.uneven
    ]


def _breakdown_rows(rank: RankEstimate, peak: Peak, *, symmetric_bytes: int) -> list[tuple[str, str, str, str]]:
    """A row per part of the peak, largest first; then the sums, and what is outside of the allocator."""
    digits = _digits(peak.reserved_bytes)
    closed_form = rank.formula.parts if rank.formula else {}
    rows = [
        (label, size, f"{size / peak.allocated_bytes:.0%}", closed_form.get(part))
        for part, label in LABELS.items()
        if (size := peak.by_part.get(part, 0)) >= peak.allocated_bytes / 2000 or part in closed_form
    ]
    rows.sort(key=lambda row: -row[1])
    rows += [
        ("= allocated", peak.allocated_bytes, "100%", rank.formula.total_bytes if rank.formula else None),
        ("idle in pools of other streams", peak.idle_pools_bytes, "", None),
        ("fragmentation", peak.fragmentation_bytes, "", None),
        ("= reserved", peak.reserved_bytes, "", None),
    ]
    if symmetric_bytes:
        rows.append(("symmetric memory, in addition", symmetric_bytes, "", None))
    return [
        (what, _gib(size, digits), share, "" if formula is None else _gib(formula, digits))
        for what, size, share, formula in rows
    ]


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


def _farthest_part(rank: RankEstimate) -> str:
    traced, formula = rank.steady.by_part, rank.formula.parts if rank.formula else {}
    return max(PARTS, key=lambda part: abs(traced.get(part, 0) - formula.get(part, 0)))


def _digits(num_bytes: int) -> int:
    """Decimal places for GiB in a table whose largest entry this is."""
    return 2 if num_bytes >= GIB else 5


def _gib(num_bytes: int, digits: int | None = None) -> str:
    return f"{num_bytes / GIB:.{_digits(abs(num_bytes)) if digits is None else digits}f}"
