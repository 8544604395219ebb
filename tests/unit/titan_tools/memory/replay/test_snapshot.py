"""The snapshot of a replay, read by PyTorch's own tools for snapshots."""

import pickle
import pickletools
import re
from collections import Counter

import pytest
from torch.cuda import _memory_viz

from tests.memory_traces import make_step_trace
from titan_tools.memory.replay.replay import replay
from titan_tools.memory.replay.snapshot import write_snapshot

BOTH = pytest.mark.parametrize("allocator", ["classic", "expandable"])

# What `unpickle` in torch/utils/viz/MemoryViz.js reads
_OPCODES_OF_THE_VIEWER = """
APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE PROTO SETITEMS
SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1 TUPLE3
LONG_BINPUT LIST DICT SETITEM"""


@pytest.fixture(params=["classic", "expandable"])
def written(request, tmp_path):
    """A replay, its snapshot as bytes, and as read."""
    replayed = replay(make_step_trace(), allocator=request.param)
    write_snapshot(replayed, tmp_path / "made.pickle")
    raw = (tmp_path / "made.pickle").read_bytes()
    return replayed, raw, pickle.loads(raw)


def test_torchs_summary_finds_the_same_bytes(written):
    replayed, _, snapshot = written
    said = _memory_viz.segsum(snapshot)
    reserved, allocated = replayed.reserved[-1], replayed.allocated[-1]
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in said
    assert f"total_allocated: {_memory_viz.Bytes(allocated)}" in said
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == reserved
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == allocated


def test_torchs_trace_matches_each_free_with_its_allocation(written):
    replayed, _, snapshot = written
    said = _memory_viz.trace(snapshot)
    assert re.search(r"Device 0 -+\n(\d+) entries", said)[1] == str(len(snapshot["device_traces"][0]))
    assert not re.search(r"(del|completed for) \d{6}", said), "an address that was never allocated"
    kept = _memory_viz.filter_alloc_free_pairs(pickle.loads(pickle.dumps(snapshot)))["device_traces"][0]
    live = [entry["addr"] for entry in kept if entry["action"] == "alloc"]
    at_end = [
        block["address"] for segment in snapshot["segments"] for block in segment["blocks"] if block["requested_size"]
    ]
    assert sorted(live) == sorted(at_end)
    assert not any(entry["action"].startswith("free") for entry in kept)


def test_torchs_flame_graphs_tell_part_owner_phase_and_stream(written):
    _, _, snapshot = written
    lines = _memory_viz.memory(snapshot, format_flamegraph=lambda text: text).splitlines()
    assert any(
        "stream:0:compute;step 0:0:stage 0, microbatch 0;build:0:-;parameters:0:layers.0.weight" in line
        for line in lines
    )
    assert any("optimizer:0:-;optimizer:0:layers.3.weight" in line for line in lines)
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == sum(s["total_size"] for s in snapshot["segments"])


def test_torchs_pages_take_it(written):
    _, raw, snapshot = written
    for page in (
        _memory_viz.trace_plot(snapshot),
        _memory_viz.trace_plot(snapshot, plot_segments=True),
        _memory_viz.segment_plot(snapshot),
    ):
        assert "MemoryViz.js" in page and len(page) > len(raw) * 4 // 3


def test_the_viewer_knows_each_opcode_of_the_file_and_finds_the_category_that_it_needs(written):
    _, raw, snapshot = written
    assert {opcode.name for opcode, _, _ in pickletools.genops(raw)} <= set(_OPCODES_OF_THE_VIEWER.split())
    assert raw[:2] == b"\x80\x04"
    categories = {entry["category"] for entry in snapshot["device_traces"][0]}
    assert {"unknown", "parameters", "activations", "all_gather"} <= categories
    assert all(address < 2**53 for address in _addresses(snapshot)), "the viewer's numbers are doubles"


def _addresses(snapshot) -> list[int]:
    return [entry["addr"] for entry in snapshot["device_traces"][0]]


def test_entries_are_those_of_torchs_history(written):
    replayed, _, snapshot = written
    (entries,) = snapshot["device_traces"]
    counts = Counter(entry["action"] for entry in entries)
    num_blocks, num_events = len(replayed.trace.blocks), len(replayed.allocated)
    assert counts["alloc"] == num_blocks
    assert counts["free_requested"] == counts["free_completed"] == num_events - num_blocks
    taken = "segment_map" if replayed.allocator == "expandable" else "segment_alloc"
    assert (
        counts[taken] == len(replayed.driver_calls) == sum(counts.values()) - num_blocks - 2 * counts["free_requested"]
    )
    mapped: list[tuple[int, int]] = []
    for entry in entries:  # memory is taken from the driver before it is given out
        if entry["action"] == taken:
            mapped.append((entry["addr"], entry["addr"] + entry["size"]))
        elif entry["action"] == "alloc":
            assert any(begin <= entry["addr"] < end for begin, end in mapped)
    assert [entry["time_us"] for entry in entries] == sorted(entry["time_us"] for entry in entries)


@BOTH
def test_segments_are_filled_without_gaps(allocator, tmp_path):
    trace = make_step_trace()
    needed = replay(trace, allocator=allocator).steady.reserved_bytes
    tight = replay(trace, allocator=allocator, capacity_bytes=needed - (20 << 20))  # so that memory is given back
    assert not tight.out_of_memory
    assert {call.action for _, call in tight.driver_calls} & {"segment_free", "segment_unmap"}
    write_snapshot(tight, tmp_path / "tight.pickle")
    segments = pickle.loads((tmp_path / "tight.pickle").read_bytes())["segments"]
    assert sum(segment["total_size"] for segment in segments) == tight.reserved[-1]
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at and block["size"] > 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
