"""Draw one step of a replayed trace: memory by part as stacked areas, reserved memory, and the GPU's capacity."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from converters.common.sizes import GIB
from titan_tools.memory.replay.replay import Replayed
from titan_tools.memory.trace.events import StepPoint

_MOST_COLUMNS = 3000  # if there are more events, several share a column, which shows the one with most allocated

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
LIMIT = "#c0392b"  # the GPU's capacity
_PHASES = {"forward": "#d5e6d3", "backward": "#f3e1c0", "weight": "#eadcb0", "optimizer": "#cfdcec"}


class Columns(NamedTuple):
    """The last step of a replay. Column i spans events x[i] to x[i + 1]; bytes are those after its highest event."""

    x: list[int]  # numbers of events, one more than there are columns
    by_part: dict[str, list[int]]  # in the order of STACK, without parts that are always zero
    allocated: list[int]
    reserved: list[int]
    peak: int  # the column with most allocated
    phases: list[tuple[int, StepPoint]]  # numbers of events in each phase of a microbatch and stage


def last_step(replayed: Replayed) -> Columns:
    """Columns of the last step of a replay that did not run out of memory."""
    trace, last = replayed.trace, replayed.trace.segments[-1].point.step
    segments = [segment for segment in trace.segments if segment.point.step == last]
    num_events = sum(len(segment.events) for segment in segments)
    first = len(replayed.allocated) - num_events
    row_of = {part: row for row, part in enumerate(STACK)}
    changes = np.zeros((len(STACK), num_events), dtype=np.int64)
    for number, (_, event) in enumerate(trace.events()):
        block = event if event >= 0 else ~event
        change = replayed.sizes[block] if event >= 0 else -replayed.sizes[block]
        changes[row_of[trace.blocks[block].part], max(number - first, 0)] += change
    by_part = changes.cumsum(axis=1)
    allocated = by_part.sum(axis=0)
    width = -(-num_events // _MOST_COLUMNS)
    starts = range(0, num_events, width)
    highest = [start + int(allocated[start : start + width].argmax()) for start in starts]  # no peak is lost
    phases = groupby(segments, lambda segment: segment.point._replace(module=""))
    return Columns(
        [*starts, num_events],
        {part: by_part[row, highest].tolist() for part, row in row_of.items() if by_part[row].any()},
        allocated[highest].tolist(),
        [replayed.reserved[first + event] for event in highest],
        int(allocated[highest].argmax()),
        [(sum(len(segment.events) for segment in phase), point) for point, phase in phases],
    )


def draw_timeline(
    replayed: Replayed, path: Path, *, title: str, peak_at: str, limit: tuple[str, int], labels: Mapping[str, str]
) -> None:
    """Draw the last step. `limit`: the GPU's name and usable bytes; `labels`: names of parts.

    The path's suffix sets the format: png, svg, pdf. A trace has no clock: the x axis counts allocations and frees in
    their order, as that of pytorch.org/memory_viz does.
    """
    from matplotlib.figure import Figure

    columns = last_step(replayed)
    subtitle = f"step {columns.phases[0][1].step}: every later one is the same; {replayed.allocator} allocator"
    figure = Figure(figsize=(14, 7.6), dpi=150)
    areas, strip = figure.subplots(2, 1, sharex=True, height_ratios=(18, 1), gridspec_kw={"hspace": 0.025})
    figure.subplots_adjust(left=0.05, right=0.775, top=0.885, bottom=0.07)
    figure.text(0.05, 0.945, title, fontsize=15, weight="bold")
    figure.text(0.05, 0.912, subtitle, fontsize=10.5, color="gray")
    _draw_areas(areas, columns, labels)
    name, capacity = limit[0], limit[1] / GIB
    highest = max(columns.reserved) / GIB
    is_in_view = capacity <= 3 * highest  # a line far above would compress the areas
    top = 1.1 * max(highest, capacity if is_in_view else 0)
    areas.set(xlim=(0, columns.x[-1]), ylim=(0, top), ylabel="GiB")
    areas.axhline(capacity, color=LIMIT, linewidth=1.4, linestyle="--")
    peak_x, peak_y = columns.x[columns.peak], columns.allocated[columns.peak] / GIB
    is_left = peak_x > columns.x[-1] / 2  # on which side texts are
    text = f" {name}: {capacity:.1f} GiB usable{'' if is_in_view else ' ↑'} "
    at = (0 if is_left else columns.x[-1]), min(capacity, 0.96 * top)
    areas.text(*at, text, ha="left" if is_left else "right", va="bottom", color=LIMIT)
    areas.annotate(
        f"peak: {peak_y:.2f} GiB allocated\n{peak_at}",
        (peak_x, peak_y),
        (-34 if is_left else 34, -54 if peak_y > 0.8 * top else 20),
        textcoords="offset points",
        ha="right" if is_left else "left",
        bbox={"boxstyle": "round", "facecolor": "white"},
        arrowprops={"arrowstyle": "->"},
    )
    _draw_phases(strip, columns)
    figure.savefig(path)


def _draw_areas(axes: Any, columns: Columns, labels: Mapping[str, str]) -> None:
    """The areas and their legend, with each part's bytes at the peak."""

    def steps(values: list[int]) -> list[float]:
        return [value / GIB for value in (*values, values[-1])]

    x, reserved = columns.x, steps(columns.reserved)
    unused = axes.fill_between(x, steps(columns.allocated), reserved, step="post", facecolor="#efeeec")
    colors = [STACK[part] for part in columns.by_part]
    areas = axes.stackplot(x, *map(steps, columns.by_part.values()), colors=colors, step="post", linewidth=0)
    (line,) = axes.step(x, reserved, where="post", color="black", linewidth=1.4)
    at_peak = columns.reserved[columns.peak], columns.allocated[columns.peak]
    entries = [(line, "reserved", at_peak[0]), (unused, "reserved, not allocated", at_peak[0] - at_peak[1])]
    for area, (part, values) in reversed(list(zip(areas, columns.by_part.items(), strict=True))):
        entries.append((area, labels[part], values[columns.peak]))
    axes.legend(
        [handle for handle, _, _ in entries],
        [f"{name:<24}{num_bytes / GIB:7.2f}" for _, name, num_bytes in entries],
        title=f"GiB at the peak: {at_peak[1] / GIB:.2f} allocated",
        loc="upper left",
        bbox_to_anchor=(1.012, 1.0),
        frameon=False,
        prop={"family": "DejaVu Sans Mono", "size": 8.6},
    )


def _draw_phases(strip: Any, columns: Columns) -> None:
    """The phases in a strip below the areas, each in its color."""
    begin = 0
    for width, point in columns.phases:
        strip.broken_barh([(begin, width)], (0, 1), facecolor=_PHASES.get(point.phase, "#e4e4e4"), edgecolor="white")
        name = point.phase.replace("_", " ") + (f" {point.microbatch}" if point.microbatch > 0 else "")
        if width / columns.x[-1] > 0.007 * len(name):
            strip.text(begin + width / 2, 0.46, name, ha="center", va="center", fontsize=9)
        begin += width
    strip.set(ylim=(0, 1), yticks=[], xlabel="allocations and frees, in order; a trace has no clock")
