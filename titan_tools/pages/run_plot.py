"""Draw the metrics of one run, or of several over one another. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from converters.common.errors import CheckpointError
from converters.store.replace_file import replacing
from titan_tools.pages.run_folder import Curve, read_curves

PICTURES = (".png", ".svg", ".pdf")
_COLORS = ("#2f6db3", "#d9742b", "#3f9a5a", "#a8423f", "#7d5ba6", "#8a6d3b", "#c25b93", "#5c6670", "#93a13a", "#2f9db0")
_INK, _FAINT = "#2b2b2b", "#7a7a7a"
_FEW, _MANY = 40, 400  # points of a curve: up to these each is marked, beyond these a mean is drawn over faint ones
_MEAN_OF = 100  # as many means fit a curve
_WIDE_RANGE = 50  # largest value over the median, from which a panel of positive values is logarithmic


class Line(NamedTuple):
    """A metric of a panel: its name, what the legend calls it, the factor to the panel's unit, and how it is drawn."""

    metric: str
    label: str
    factor: float = 1.0
    style: Any = "-"  # of matplotlib


@dataclass(frozen=True, slots=True)
class Panel:
    """Metrics that share an axis; drawn if a run has the first one."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    from_zero: bool = True
    is_noisy: bool = True  # a long curve is shown by its mean


LOSS = Panel(
    "loss",
    "nats per token",
    (
        Line("loss", "training"),
        Line("validation_loss", "held out", style="--"),
        Line("validation_unigram_entropy", "unigram entropy", style=":"),
    ),
    from_zero=False,
)
PANELS = (
    LOSS,
    Panel("gradient norm", "before clipping", (Line("grad_norm", ""),)),
    Panel("learning rate", "", (Line("lr", ""),), is_noisy=False),
    Panel("throughput", "tokens/s, all ranks", (Line("tokens_per_sec", ""),)),
    Panel("MFU", "% of the GPU's peak", (Line("mfu", "", 100),)),
    Panel(
        "peak memory",
        "GiB, rank with most",
        (Line("memory_gib", "reserved"), Line("memory_allocated_gib", "allocated", style="--")),
        is_noisy=False,
    ),
    Panel("waiting for data", "ms per step", (Line("data_secs", "", 1000),)),
    Panel("expert load", "busiest expert / mean", (Line("expert_load", "worst layer"),)),
)


def refuse_other_pictures(path: Path) -> None:
    """Raise CheckpointError for a file name whose suffix is not that of a picture."""
    if path.suffix.lower() not in PICTURES:
        raise CheckpointError(f"--plot {path}: the file name must end in {', '.join(PICTURES)}")


def plot_runs(runs: Sequence[Path], picture: Path, *, panels: Sequence[Panel] = PANELS) -> None:
    """Draw the panels for which there are metrics. Raises CheckpointError if a run has none.

    The picture's suffix sets its format; without one of PICTURES it is a PNG.
    """
    curves = {run: read_curves(run) for run in runs}
    if empty := [str(run) for run in runs if not curves[run].get(panels[0].lines[0].metric)]:
        raise CheckpointError(f"{', '.join(empty)}: no loss was recorded yet")
    # imported here: matplotlib takes longer to load than the rest of `titan inspect`
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [panel for panel in panels if any(panel.lines[0].metric in of_run for of_run in curves.values())]
    num_columns = min(3, len(drawn))
    num_rows = -(-len(drawn) // num_columns)
    size = (8, 4.5) if len(drawn) == 1 else (5 * num_columns, 2.9 * num_rows + 0.8)
    figure = Figure(figsize=size, dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    names = _names(runs)
    for position, panel in enumerate(drawn, start=1):
        _draw(
            figure.add_subplot(num_rows, num_columns, position), panel, dict(zip(names, curves.values(), strict=True))
        )
    if any(len(curve) > _MANY for of_run in curves.values() for curve in of_run.values()):
        text = f"lines: mean of 1/{_MEAN_OF} of the run; faint: each logged step"
        figure.text(0.995, 0.995, text, ha="right", va="top", fontsize=8.5, color=_FAINT)
    figure.suptitle(names[0] if len(runs) == 1 else f"{len(runs)} runs", fontsize=13, color=_INK, weight="bold")
    if len(runs) > 1:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], color=_color(number), linewidth=2) for number in range(len(names))]
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False, fontsize=9.5)
    try:
        with replacing(picture) as unfinished:  # a full disk must not destroy an existing picture
            suffix = picture.suffix.lower()
            figure.savefig(unfinished, format=suffix[1:] if suffix in PICTURES else "png")
    except OSError as error:
        raise CheckpointError(f"{picture}: cannot be written ({error.strerror})") from error


def _draw(axes: Any, panel: Panel, runs: Mapping[str, Mapping[str, Curve]]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    values: list[float] = []
    for number, of_run in enumerate(runs.values()):
        for index, line in enumerate(panel.lines):
            if not (curve := of_run.get(line.metric)):
                continue
            # Of one run each line has a color of its own, of several each run has
            color = _color(index if len(runs) == 1 else number)
            has_points = max(len(curves.get(line.metric, ())) for curves in runs.values()) <= _FEW
            values += _draw_curve(axes, curve, line, color, has_points=has_points, is_noisy=panel.is_noisy)
    if len(runs) == 1 and panel.title == "expert load":
        _draw_layers(axes, next(iter(runs.values())))
    axes.set_title(panel.title, fontsize=11, color=_INK, loc="left")
    axes.set_ylabel(panel.unit, fontsize=9, color=_FAINT)
    axes.set_xlabel("step", fontsize=9, color=_FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if panel.from_zero and min(values) > 0 and max(values) > _WIDE_RANGE * sorted(values)[len(values) // 2]:
        axes.set_yscale("log")
    elif panel.from_zero:
        axes.set_ylim(0, 1.08 * max(values) or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.tick_params(labelsize=8.5, color=_FAINT)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if any(line.label for line in panel.lines):
        _name_lines(axes, panel, runs)


def _draw_curve(axes: Any, curve: Curve, line: Line, color: str, *, has_points: bool, is_noisy: bool) -> list[float]:
    """Draw a curve and return its values in the panel's unit; a long one as its mean over faint values."""
    steps, values = [step for step, _ in curve], [value * line.factor for _, value in curve]
    marker = "o" if has_points and line.style != ":" else None
    means = values
    if is_noisy and len(curve) > _MANY:
        axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        means = _means(values)
    axes.plot(steps, means, line.style, label=line.label, color=color, linewidth=1.4, marker=marker, markersize=2.5)
    return values


def _means(values: Sequence[float]) -> list[float]:
    """The mean around each value, of a hundredth of the curve; of fewer values at the ends."""
    import numpy as np

    window = np.ones(len(values) // _MEAN_OF | 1)
    means: list[float] = (
        np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    ).tolist()
    return means


def _draw_layers(axes: Any, curves: Mapping[str, Curve]) -> None:
    """Faint lines of the layers."""
    layers = [curve for name, curve in curves.items() if name.startswith("expert_load/")]
    for number, curve in enumerate(layers):
        label = "each layer" if number == 0 else None
        values = [value for _, value in curve]
        means = _means(values) if len(values) > _MANY else values
        axes.plot([step for step, _ in curve], means, color=_FAINT, linewidth=0.6, alpha=0.5, label=label, zorder=1)


def _name_lines(axes: Any, panel: Panel, runs: Mapping[str, Mapping[str, Curve]]) -> None:
    """The legend of a panel; of several runs only how their lines differ, in grey."""
    if len(runs) == 1:
        handles, labels = axes.get_legend_handles_labels()
    else:
        from matplotlib.lines import Line2D

        lines = [line for line in panel.lines if any(line.metric in of_run for of_run in runs.values())]
        handles = [Line2D([], [], color=_FAINT, linestyle=line.style) for line in lines]
        labels = [line.label for line in lines]
    if len(handles) > 1:
        axes.legend(handles, labels, fontsize=8.5, frameon=False)


def _number(value: float, _: int) -> str:
    """1,200,000; 0.006; 6e-05"""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _names(runs: Sequence[Path]) -> list[str]:
    """The folders' own names if they differ, else their paths."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]
