"""Draw one step of a replayed trace: memory by part as stacked areas, reserved memory, and the GPU's limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from converters.common.sizes import GIB
from titan_tools.memory.replay.replay import Peak, Replayed
from titan_tools.memory.trace.events import StepPoint

_MOST_COLUMNS = 3000  # if there are more events, several share a column, which shows the one with most allocated


class Band(NamedTuple):
    """The events of a phase of one microbatch and stage."""

    begin: int
    end: int
    point: StepPoint


@dataclass(slots=True)
class Columns:
    """A step, event by event. Column i spans the events x[i] to x[i + 1]; bytes are those after them."""

    x: list[int]  # numbers of events, one more than there are columns
    by_part: dict[str, list[int]]  # in the given order, without parts that are always zero
    allocated: list[int]
    reserved: list[int]
    bands: list[Band]
    peak: int  # the column with most allocated
    peak_point: StepPoint


def step_columns(replayed: Replayed, parts: Sequence[str], *, step: int) -> Columns:
    """Columns of a step, by `parts`, which must be all of its parts. Raises ValueError if there is no such step."""
    number_of = {part: row for row, part in enumerate(parts)}
    blocks = replayed.trace.blocks
    held = np.zeros((len(parts), 1), dtype=np.int64)
    rows, deltas, points = [], [], []
    first = 0
    for number, (segment, event) in enumerate(replayed.trace.events()):
        if segment.point.step > step or number == len(replayed.allocated):
            break
        block = event if event >= 0 else ~event
        row = number_of[blocks[block].part]
        delta = replayed.sizes[block] if event >= 0 else -replayed.sizes[block]
        if segment.point.step < step:
            held[row] += delta
            first = number + 1
        else:
            rows.append(row)
            deltas.append(delta)
            points.append(segment.point)
    if not rows:
        raise ValueError(f"the replay has no step {step}")
    change = np.zeros((len(parts), len(rows)), dtype=np.int64)
    change[rows, np.arange(len(rows))] = deltas
    by_part = held + change.cumsum(axis=1)
    allocated = by_part.sum(axis=0)
    starts, kept = _highest_of_each(allocated, -(-len(rows) // _MOST_COLUMNS))
    peak = int(allocated[kept].argmax())
    return Columns(
        [*starts, len(rows)],
        {part: by_part[row, kept].tolist() for part, row in number_of.items() if by_part[row].any()},
        allocated[kept].tolist(),
        [replayed.reserved[first + event] for event in kept],
        _bands(points),
        peak,
        points[kept[peak]],
    )


def _highest_of_each(allocated: Any, width: int) -> tuple[list[int], list[int]]:
    """Of each `width` consecutive events the first, and the highest: no peak is lost."""
    starts = list(range(0, len(allocated), width))
    return starts, [start + int(allocated[start : start + width].argmax()) for start in starts]


def _bands(points: Sequence[StepPoint]) -> list[Band]:
    bands: list[Band] = []
    last = None
    for number, point in enumerate(points):
        kind = point.phase, point.microbatch, point.stage
        if kind == last:
            bands[-1] = bands[-1]._replace(end=number + 1)
        else:
            bands.append(Band(number, number + 1, point))
        last = kind
    return bands


_LIMIT_IN_VIEW = 3  # a limit above this × reserved is written as text: drawing it would compress the areas

# Bottom to top: what stays for the whole step, what forward keeps for backward, temporary memory
STACK = {
    "parameters": "#2f4b6e",
    "optimizer": "#5b7ea6",
    "gradients": "#9dbbd8",
    "activations": "#4f9d69",
    "recompute": "#a3cf9b",
    "logits_and_loss": "#e8a33d",
    "all_gather": "#8d6cab",
    "reduce_scatter": "#c3a5d6",
    "pipeline_buffers": "#c9615a",
    "workspaces": "#8c8378",
    "other": "#c9c4bb",
}
_PHASES = {
    "forward": "#d5e6d3",
    "backward": "#f3e1c0",
    "weight": "#eadcb0",
    "reduce": "#e6dbef",
    "clip": "#d6dde6",
    "optimizer": "#cfdcec",
    "zero_grad": "#e4e4e4",
    "validation": "#f0e0e0",
}
_INK, _FAINT, _LIMIT = "#2b2b2b", "#7a7a7a", "#c0392b"
_MONOSPACED = {"family": "DejaVu Sans Mono", "size": 8.6}
_RIGHT_OF_AREAS = 1.012  # x of the legend, in shares of the areas' width


def draw_timeline(
    replayed: Replayed,
    path: Path,
    *,
    title: str = "Memory of one GPU through a training step",
    limit: tuple[str, int] | None = None,
    labels: Mapping[str, str] | None = None,
    step: int | None = None,
) -> None:
    """Draw a step, the last by default. `limit`: the GPU's name and usable bytes; `labels`: names of parts.

    The path's suffix sets the format: png, svg, pdf. A trace has no clock: the x axis counts allocations and frees in
    their order, as that of pytorch.org/memory_viz does.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    step = replayed.trace.segments[-1].point.step if step is None else step
    columns = step_columns(replayed, list(STACK), step=step)
    figure = Figure(figsize=(14, 7.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    areas, strip = figure.subplots(2, 1, sharex=True, height_ratios=(18, 1), gridspec_kw={"hspace": 0.025})
    figure.subplots_adjust(left=0.05, right=0.775, top=0.885, bottom=0.07)
    top = max(columns.reserved) / GIB
    if limit and limit[1] <= _LIMIT_IN_VIEW * max(columns.reserved):
        top = max(top, limit[1] / GIB)
    areas.set_ylim(0, top * 1.1)
    areas.set_xlim(0, columns.x[-1])
    _draw_areas(areas, columns, labels or {})
    if limit:
        at_left = columns.x[columns.peak] > columns.x[-1] / 2  # away from the peak
        _draw_limit(areas, *limit, is_in_view=limit[1] / GIB <= top, at_left=at_left)
    _draw_peak(areas, columns)
    _draw_bands(strip, areas, columns)
    if peak := replayed.step1 if step < 2 else replayed.steady:
        _draw_pools(areas, peak)
    figure.text(0.05, 0.945, title, fontsize=15, color=_INK, weight="bold")
    what = {0: "before the first step", 1: "the first step"}.get(step, f"step {step}: every later one is the same")
    figure.text(0.05, 0.912, f"{what}; {replayed.allocator} allocator", fontsize=10.5, color=_FAINT)
    figure.savefig(path)


def _draw_areas(axes: Any, columns: Columns, labels: Mapping[str, str]) -> None:
    """The areas and their legend, with each part's share of the peak."""

    def steps(values: list[int]) -> list[float]:
        return [value / GIB for value in (*values, values[-1])]

    x, peak = columns.x, columns.peak
    allocated, reserved = steps(columns.allocated), steps(columns.reserved)
    unused = axes.fill_between(x, allocated, reserved, step="post", facecolor="#efeeec", linewidth=0)
    stack = [steps(values) for values in columns.by_part.values()]
    colors = [STACK[part] for part in columns.by_part]
    drawn = axes.stackplot(x, stack, colors=colors, step="post", linewidth=0)
    (line,) = axes.step(x, reserved, where="post", color=_INK, linewidth=1.4)
    entries = [
        (line, "reserved", columns.reserved[peak]),
        (unused, "reserved, not allocated", columns.reserved[peak] - columns.allocated[peak]),
    ]
    for area, part in reversed(list(zip(drawn, columns.by_part, strict=True))):
        entries.append((area, labels.get(part, part.replace("_", " ")), columns.by_part[part][peak]))
    legend = axes.legend(
        [handle for handle, _, _ in entries],
        [_line(name, value) for _, name, value in entries],
        loc="upper left",
        bbox_to_anchor=(_RIGHT_OF_AREAS, 1.0),
        borderaxespad=0,
        frameon=False,
        title=f"GiB at the peak: {columns.allocated[peak] / GIB:.2f} allocated",
        alignment="left",
        prop=_MONOSPACED,
        title_fontproperties={"weight": "bold", "size": 10.5},
        labelspacing=0.75,
    )
    legend.get_title().set_color(_INK)
    axes.set_ylabel("GiB", color=_INK)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.grid(axis="y", color="white", alpha=0.35, linewidth=0.8)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _line(name: str, num_bytes: int) -> str:
    return f"{name:<24}{num_bytes / GIB:7.2f}"


def _draw_limit(axes: Any, name: str, num_bytes: int, *, is_in_view: bool, at_left: bool) -> None:
    text, height, offset = f"{name}: {num_bytes / GIB:.1f} GiB usable", num_bytes / GIB, 5
    if is_in_view:
        axes.axhline(height, color=_LIMIT, linewidth=1.4, linestyle=(0, (6, 3)))
    else:
        text, height, offset = f"{text} ↑", axes.get_ylim()[1], -12
    right = axes.get_xlim()[1]
    at, offsets, align = ((0, height), (6, offset), "left") if at_left else ((right, height), (-6, offset), "right")
    axes.annotate(text, at, offsets, textcoords="offset points", ha=align, color=_LIMIT, fontsize=10)


def _draw_peak(axes: Any, columns: Columns) -> None:
    x, height = columns.x[columns.peak], columns.allocated[columns.peak] / GIB
    left, below = x > columns.x[-1] / 2, height > 0.8 * axes.get_ylim()[1]
    text = f"peak: {height:.2f} GiB allocated\nin {_in_words(columns.peak_point)}"
    axes.plot([x], [height], "o", color="white", markeredgecolor=_INK, markersize=6.5, zorder=5)
    axes.annotate(
        text,
        (x, height),
        (-34 if left else 34, -54 if below else 20),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=10,
        color=_INK,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": _FAINT, "linewidth": 0.8},
        arrowprops={"arrowstyle": "-", "color": _INK, "linewidth": 0.9},
        zorder=6,
    )


def _in_words(point: StepPoint) -> str:
    phase = point.phase.replace("_", " ")
    return f"{phase} of {point.module}" if point.module else phase


def _draw_pools(axes: Any, peak: Peak) -> None:
    """A list of the pools that hold reserved but unallocated memory."""
    lines = [_line(stream, size) for stream, size in peak.unused_by_stream.items() if size >= GIB / 200]
    if not lines:
        return
    style = {"transform": axes.transAxes, "va": "bottom", "color": _INK}
    axes.text(_RIGHT_OF_AREAS + 0.037, 0, "\n".join(lines), fontproperties=_MONOSPACED, linespacing=1.6, **style)
    height = 0.034 * len(lines) + 0.012
    axes.text(_RIGHT_OF_AREAS + 0.004, height, "Unused GiB, by stream's pool", weight="bold", size=10, **style)


def _draw_bands(strip: Any, areas: Any, columns: Columns) -> None:
    """The phases: a strip below the areas, and faint lines where long ones begin."""
    from matplotlib.ticker import FuncFormatter

    is_many = len({band.point.microbatch for band in columns.bands if band.point.microbatch >= 0}) > 1
    for begin, end, point in columns.bands:
        width, share = end - begin, (end - begin) / columns.x[-1]
        color = _PHASES.get(point.phase, "#e8e8e8")
        strip.broken_barh([(begin, width)], (0, 1), facecolor=color, edgecolor="white", linewidth=0.4)
        phase = point.phase.replace("_", " ")
        number = f" {point.microbatch}" if is_many and point.microbatch >= 0 else ""
        for name in (phase + number, phase[0].upper() + number.strip()):
            if share > 0.007 * len(name) + 0.003:
                strip.text(begin + width / 2, 0.46, name, ha="center", va="center", fontsize=9, color=_INK)
                break
        if share > 0.02 and begin > 0:
            areas.axvline(begin, color=_INK, linewidth=0.5, alpha=0.2)
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    strip.spines[:].set_visible(False)
    strip.tick_params(axis="x", length=3, labelsize=8.5, color=_FAINT, labelcolor=_FAINT)
    strip.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.0f}"))
    strip.set_xlabel("allocations and frees, in order; a trace has no clock", fontsize=9.5, color=_FAINT)
