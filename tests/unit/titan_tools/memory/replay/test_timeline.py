"""The picture of a step: its numbers by hand, and the file that is drawn."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.memory_traces import MIB, TraceMaker, make_step_trace
from titan_tools.memory.replay.replay import Replayed, replay
from titan_tools.memory.replay.timeline import LIMIT, STACK, draw_timeline, last_step
from titan_tools.memory.trace.events import PARTS

GIB = 1 << 30


def test_every_part_has_a_place_in_the_stack():
    assert sorted(STACK) == sorted(PARTS)


def test_columns_by_hand():
    maker = TraceMaker()
    maker.allocate(20 * MIB, "parameters")
    maker.at(1, "forward")
    kept = maker.allocate(40 * MIB, "activations")
    maker.at(2, "forward", 0, 0, "layers.0")
    more = maker.allocate(30 * MIB, "activations")
    maker.at(2, "backward", 0, 0, "layers.0")
    maker.free(more)
    maker.at(2, "backward", 0, 0, "layers.1")
    maker.free(kept)
    columns = last_step(replay(maker.trace, allocator="classic"))
    assert columns.by_part == {"parameters": [20 * MIB] * 3, "activations": [70 * MIB, 40 * MIB, 0]}
    assert columns.allocated == [90 * MIB, 60 * MIB, 20 * MIB]
    assert columns.reserved == [90 * MIB] * 3
    assert columns.peak == 0
    assert columns.x == [0, 1, 2, 3]  # events, as pytorch.org/memory_viz counts them
    assert [(num_events, point.phase) for num_events, point in columns.phases] == [(1, "forward"), (2, "backward")]


def test_columns_agree_with_the_replay():
    replayed = replay(make_step_trace(), allocator="expandable")
    columns = last_step(replayed)
    assert max(columns.allocated) == replayed.steady.allocated_bytes
    at_peak = {part: values[columns.peak] for part, values in columns.by_part.items() if values[columns.peak]}
    assert at_peak == replayed.steady.by_part
    assert sum(num_events for num_events, _ in columns.phases) == columns.x[-1]


def test_many_events_share_columns_and_the_peak_is_kept():
    trace = make_step_trace(num_layers=600)
    replayed = replay(trace, allocator="expandable")
    columns = last_step(replayed)
    assert len(columns.allocated) < 3001 < len(replayed.allocated) / 2
    assert max(columns.allocated) == replayed.steady.allocated_bytes
    assert len(columns.x) == len(columns.allocated) + 1 and columns.x == sorted(columns.x)


def _pixels(path: Path) -> np.ndarray:
    """0xRRGGBB by row and column."""
    with Image.open(path) as image:
        red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), dtype=np.int32), -1, 0)
    return (red << 16) + (green << 8) + blue


def _count(pixels: np.ndarray, color: str) -> int:
    return np.count_nonzero(pixels == int(color[1:], 16))


def draw(replayed: Replayed, path: Path, *, capacity_bytes: int) -> None:
    limit = ("a GPU", capacity_bytes)
    draw_timeline(
        replayed, path, title="A title", peak_at="forward", limit=limit, labels={part: part for part in STACK}
    )


def test_the_picture_has_each_part_in_its_color_and_in_its_share(tmp_path):
    replayed = replay(make_step_trace(), allocator="expandable")
    draw(replayed, tmp_path / "out.png", capacity_bytes=600 * MIB)
    pixels = _pixels(tmp_path / "out.png")
    assert pixels.shape == (1140, 2100)
    by_part = last_step(replayed).by_part
    for part in STACK:
        assert (_count(pixels, STACK[part]) > 1000) == (part in by_part), part
    # What stays all the step long is a rectangle: areas are as bytes (the legend's patch aside)
    ratio = _count(pixels, STACK["optimizer"]) / _count(pixels, STACK["parameters"])
    assert ratio == pytest.approx(by_part["optimizer"][0] / by_part["parameters"][0], rel=0.15)


def test_the_gpus_capacity_is_a_line_unless_it_is_far_above(tmp_path):
    replayed = replay(make_step_trace(), allocator="expandable")
    draw(replayed, tmp_path / "near.png", capacity_bytes=600 * MIB)
    draw(replayed, tmp_path / "far.png", capacity_bytes=1000 * GIB)
    near, far = (_pixels(tmp_path / name) for name in ("near.png", "far.png"))
    line, others = (np.count_nonzero(pixels == int(LIMIT[1:], 16), axis=1).max() for pixels in (near, far))
    assert line > 500 > 100 > others  # pixels of a row: dashes from one side to the other, or letters
    assert _count(far, STACK["parameters"]) > _count(near, STACK["parameters"])


def test_other_formats(tmp_path):
    draw(replay(make_step_trace(), allocator="classic"), tmp_path / "out.svg", capacity_bytes=GIB)
    drawn = (tmp_path / "out.svg").read_text()
    assert drawn.startswith("<?xml") and "every later one is the same; classic allocator" in drawn


def test_neither_torch_nor_matplotlib_is_loaded_before_a_picture_is_drawn():
    script = (
        "import sys; import titan_tools.memory.replay.replay, titan_tools.memory.replay.timeline; "
        "sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0
