"""Pictures of runs: which panels there are, what is in them, their formats, and refusals."""

import json
import struct
import subprocess
import sys

import matplotlib.figure
import pytest

from converters.common.errors import CheckpointError
from titan_tools.pages.run_plot import LOSS, plot_runs

STEP = {"loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_sec": 2e6, "memory_gib": 0.5, "data_secs": 0.002}
HELD_OUT = {"validation_loss": 4.5, "validation_unigram_entropy": 6.0}
ON_GPU = {"mfu": 0.4, "memory_allocated_gib": 0.4}
EXPERTS = {"expert_load": 1.5, "expert_load/layer_0": 1.5, "expert_load/layer_1": 1.25}
TITLES = ["loss", "gradient norm", "learning rate", "throughput", "peak memory", "waiting for data"]


@pytest.fixture
def figures(monkeypatch):
    """The figures that would be drawn: rendering them takes most of the time, and has tests of its own."""
    made = []

    class Kept(matplotlib.figure.Figure):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            made.append(self)

        def savefig(self, path, **_):
            path.touch()

    monkeypatch.setattr(matplotlib.figure, "Figure", Kept)
    return made


def write_run(folder, *, steps=3, tail="", **metrics):
    folder.mkdir(parents=True)
    records = [{"step": n} | STEP | metrics | {"loss": 9.0 - n} for n in range(1, steps + 1)]
    records.append({"step": steps} | HELD_OUT)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


def lines_of(figure) -> dict[str, dict[str, list[float]]]:
    """Panel → label of each line → its values."""
    return {
        axes.get_title(loc="left"): {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        for axes in figure.axes
    }


def test_a_run_has_a_panel_for_each_metric_that_it_has(tmp_path, figures):
    plot_runs([write_run(tmp_path / "plain", tail='{"step": 4, "lo')], tmp_path / "plain.png")
    plot_runs([write_run(tmp_path / "experts", **ON_GPU, **EXPERTS)], tmp_path / "experts.png")
    plain, experts = map(lines_of, figures)
    assert list(plain) == TITLES
    assert list(experts) == [*TITLES[:4], "MFU", *TITLES[4:], "expert load"]
    assert plain["loss"] == {"training": [8.0, 7.0, 6.0], "held out": [4.5], "unigram entropy": [6.0]}
    assert experts["MFU"].popitem()[1] == pytest.approx([40] * 3)
    assert plain["waiting for data"].popitem()[1] == pytest.approx([2] * 3)
    assert experts["peak memory"] == {"reserved": [0.5] * 3, "allocated": [0.4] * 3}
    assert sorted(experts["expert load"].values()) == [[1.25] * 3, [1.5] * 3, [1.5] * 3]
    assert figures[0].get_suptitle() == "plain"


def test_labels_have_units_and_separators(tmp_path, figures):
    plot_runs([write_run(tmp_path / "run", steps=200)], tmp_path / "run.png")
    (figure,) = figures
    loss, _, _, throughput, *_ = figure.axes
    assert loss.get_ylabel() == "nats per token" and throughput.get_ylabel() == "tokens/s, all ranks"
    assert "2,000,000" in [label.get_text() for label in throughput.get_yticklabels()]
    assert [axes.get_xlabel() for axes in figure.axes] == ["step"] * 6
    assert figure.get_facecolor() == (1, 1, 1, 1)


def test_a_spike_makes_a_panel_logarithmic(tmp_path, figures):
    run = write_run(tmp_path / "run", steps=9)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, "loss": 3.0, "grad_norm": 500.0}) + "\n")
    plot_runs([run], tmp_path / "run.png")
    scales = {axes.get_title(loc="left"): axes.get_yscale() for axes in figures[0].axes}
    assert scales.pop("gradient norm") == "log" and set(scales.values()) == {"linear"}


def test_a_long_curve_is_drawn_as_a_mean_over_its_values(tmp_path, figures):
    run = write_run(tmp_path / "run", steps=1)
    values = [4.0 + (n % 2) for n in range(1000)]
    records = [{"step": n, "loss": loss, "lr": loss} for n, loss in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plot_runs([run], tmp_path / "run.png")
    loss, lr = figures[0].axes
    faint, mean = (list(line.get_ydata()) for line in loss.get_lines())
    assert faint == values and all(abs(value - 4.5) <= 0.51 / 6 for value in mean)
    assert [list(line.get_ydata()) for line in lr.get_lines()] == [values]  # it has no noise


def test_runs_are_drawn_over_one_another_with_a_legend(tmp_path, figures):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=5, **EXPERTS), write_run(tmp_path / "c" / "b")]
    plot_runs(runs[:2], tmp_path / "two.png")
    plot_runs(runs, tmp_path / "three.png")
    two, three = figures
    assert list(lines_of(two)) == [*TITLES, "expert load"]
    norm = two.axes[1].get_lines()
    assert [len(line.get_ydata()) for line in norm] == [3, 5] and len({line.get_color() for line in norm}) == 2
    assert len({line.get_color() for line in two.axes[0].get_lines()}) == 2  # a run's lines have one color
    assert [text.get_text() for text in two.legends[0].get_texts()] == ["a", "b"]
    assert [text.get_text() for text in three.legends[0].get_texts()] == [str(run) for run in runs]  # two are called b


def test_the_suffix_is_the_format_and_the_losses_alone_are_a_small_png(tmp_path):
    run = write_run(tmp_path / "run")
    plot_runs([run], tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")
    plot_runs([run], tmp_path / "loss", panels=(LOSS,))
    head = (tmp_path / "loss").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (960, 540)


def test_no_loss_or_an_unwritable_picture_is_an_error(tmp_path):
    run = write_run(tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="empty: no loss was recorded yet"):
        plot_runs([run, empty], tmp_path / "loss.png")
    with pytest.raises(CheckpointError, match="cannot be written"):
        plot_runs([run], tmp_path / "no" / "loss.png")


def test_the_command_draws_one_run_or_several(tmp_path, titan, figures):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    code, out, err = titan("inspect", a, "--plot", tmp_path / "a.png", "--loss-curve", tmp_path / "loss.png")
    assert code == 0 and "training loss" in out and f"drew {tmp_path / 'a.png'}" in err
    assert [len(figure.axes) for figure in figures] == [6, 1] and (tmp_path / "loss.png").exists()
    code, out, _ = titan("inspect", a, b, "--plot", tmp_path / "both.png")
    assert code == 0 and (tmp_path / "both.png").exists()
    assert [line.split() for line in out.splitlines()[2:]] == [[str(x), "3", "6.0000", "3", "4.5000"] for x in (a, b)]
    _, out, _ = titan("inspect", a, b, "--plot", tmp_path / "both.png", "--json")
    assert [run["path"] for run in json.loads(out)["runs"]] == [str(a), str(b)]
    assert titan("inspect", a, a, "--plot", tmp_path / "twice.png").returncode == 0
    code, out, _ = titan("inspect", a / "metrics.jsonl", "--plot", tmp_path / "by-file.png")
    assert code == 0 and "training loss" in out and (tmp_path / "by-file.png").exists()
    for arguments, said in (
        ((a, b), "--plot draws several runs"),
        ((tmp_path, "--plot", tmp_path / "x.png"), "is not the folder of a run"),
        ((a, tmp_path / "none", "--plot", tmp_path / "x.png"), "none: no such folder"),
        ((a, "--plot", tmp_path / "x.jpg"), "must end in .png, .svg, .pdf"),
    ):
        code, _, err = titan("inspect", *arguments)
        assert code == 2 and said in err and not (tmp_path / "x.png").exists()


def test_neither_torch_nor_matplotlib_is_loaded_before_a_picture_is_drawn():
    script = "import sys, titan_tools.pages.run_plot; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0
