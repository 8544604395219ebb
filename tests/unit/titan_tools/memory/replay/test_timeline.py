"""The picture of a step: its numbers by hand, and the file that is drawn."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.memory_traces import MIB, TraceMaker, make_step_trace
from titan_tools.memory.replay.replay import replay
from titan_tools.memory.replay.timeline import STACK, draw_timeline, step_columns
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
    maker.free(more, kept)
    found = step_columns(replay(maker.trace, allocator="classic"), list(STACK), step=2)
    assert found.by_part == {"parameters": [20 * MIB] * 3, "activations": [70 * MIB, 40 * MIB, 0]}
    assert found.allocated == [90 * MIB, 60 * MIB, 20 * MIB]
    assert found.reserved == [90 * MIB] * 3
    assert found.peak == 0 and found.peak_point.phase == "forward"
    assert [band.point.phase for band in found.bands] == ["forward", "backward"]
    assert found.x == [0, 1, 2, 3]  # events, as pytorch.org/memory_viz counts them
    assert [(band.begin, band.end) for band in found.bands] == [(0, 1), (1, 3)]


def test_columns_agree_with_the_replay():
    replayed = replay(make_step_trace(), allocator="expandable")
    found = step_columns(replayed, list(STACK), step=2)
    assert max(found.allocated) == replayed.steady.allocated_bytes
    assert found.peak_point == replayed.steady.point
    at_peak = {part: values[found.peak] for part, values in found.by_part.items() if values[found.peak]}
    assert at_peak == replayed.steady.by_part
    assert found.bands[0].begin == found.x[0] == 0 and found.bands[-1].end == found.x[-1]
    assert all(left.end == right.begin for left, right in zip(found.bands, found.bands[1:], strict=False))


def test_many_events_share_columns_and_the_peak_is_kept():
    trace = make_step_trace(num_layers=600)
    replayed = replay(trace, allocator="expandable")
    found = step_columns(replayed, list(STACK), step=2)
    assert len(found.allocated) < 3001 < len(replayed.allocated) / 2
    assert max(found.allocated) == replayed.steady.allocated_bytes
    assert len(found.x) == len(found.allocated) + 1 and found.x == sorted(found.x)


def test_a_step_that_is_not_there_is_said():
    with pytest.raises(ValueError, match="no step 3"):
        step_columns(replay(make_step_trace(), allocator="classic"), list(STACK), step=3)


def _pixels(path: Path) -> np.ndarray:
    """0xRRGGBB by row and column."""
    with Image.open(path) as image:
        red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), dtype=np.int32), -1, 0)
    return (red << 16) + (green << 8) + blue


def _count(pixels: np.ndarray, part: str) -> int:
    return np.count_nonzero(pixels == int(STACK[part][1:], 16))


def test_the_picture_has_each_part_in_its_color_and_in_its_share(tmp_path):
    replayed = replay(make_step_trace(), allocator="expandable")
    draw_timeline(replayed, tmp_path / "out.png", title="A title", limit=("a GPU", 600 * MIB))
    pixels = _pixels(tmp_path / "out.png")
    assert pixels.shape == (1140, 2100)
    by_part = step_columns(replayed, list(STACK), step=2).by_part
    for part in STACK:
        assert (_count(pixels, part) > 1000) == (part in by_part), part
    # What stays all the step long is a rectangle: areas are as bytes (the legend's patch and the grid's lines aside)
    ratio = _count(pixels, "optimizer") / _count(pixels, "parameters")
    assert ratio == pytest.approx(by_part["optimizer"][0] / by_part["parameters"][0], rel=0.15)
    # A limit far above does not squash the picture: it is named
    draw_timeline(replayed, tmp_path / "far.png", limit=("big", 1000 * GIB))
    assert _count(_pixels(tmp_path / "far.png"), "parameters") > _count(pixels, "parameters")


def test_other_formats_and_steps(tmp_path):
    replayed = replay(make_step_trace(), allocator="classic")
    draw_timeline(replayed, tmp_path / "out.svg", step=1, labels={"recompute": "backward's own tensors"})
    drawn = (tmp_path / "out.svg").read_text()
    assert drawn.startswith("<?xml") and "the first step" in drawn and "backward's own tensors" in drawn


def test_neither_torch_nor_matplotlib_is_loaded_before_a_picture_is_drawn():
    script = (
        "import sys; import titan_tools.memory.replay.replay, titan_tools.memory.replay.timeline; "
        "sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0
