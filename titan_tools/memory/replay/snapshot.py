"""Write a replayed trace as a snapshot of torch's memory history, for the viewer at pytorch.org/memory_viz.

The format is that of torch.cuda.memory._snapshot (torch 2.11 to 2.13), of one device. In place of a stack trace the
viewer shows a block's part, owner, phase, module, step and stream; its colors are the parts.
"""

import pickle
from functools import cache
from pathlib import Path
from typing import Any

from titan_tools.memory.replay.pool import TAKING, DriverCall, granule
from titan_tools.memory.replay.replay import Replayed
from titan_tools.memory.trace.events import COMPUTE, Block, StepPoint

# The viewer's own unpickler reads protocols 2 to 4. If the category "unknown" is missing, it adds it with a statement
# that has a typo (`categores`) in some versions: so it is always present.
_PROTOCOL = 4
_UNKNOWN = "unknown"
_POOL = (0, 0)  # not a private pool
_ACTIONS_OF_FREE = ("free_requested", "free_completed")  # at once: only the block's own stream uses it

Frames = list[dict[str, str | int]]


def write_snapshot(replayed: Replayed, path: Path) -> None:
    """Write all events of a replay, and what is allocated at its end. About 100 bytes per event."""
    with path.open("wb") as file:
        pickle.dump(make_snapshot(replayed), file, protocol=_PROTOCOL)


def make_snapshot(replayed: Replayed) -> dict[str, Any]:
    """The dictionary that torch.cuda.memory._snapshot would return; times are numbers of events."""
    streams = _number_streams(replayed)
    live: dict[int, Frames] = {}
    return {
        "device_traces": [_entries(replayed, streams, live)],
        "segments": _segments(replayed, streams, live),
        "allocator_settings": {"expandable_segments": replayed.allocator == "expandable"},
        "external_annotations": [],
    }


def _number_streams(replayed: Replayed) -> dict[str, int]:
    names = dict.fromkeys([COMPUTE, *(call.stream for _, call in replayed.driver_calls)])
    return {name: number for number, name in enumerate(names)}


def _entries(replayed: Replayed, streams: dict[str, int], live: dict[int, Frames]) -> list[dict[str, Any]]:
    """Entries of the trace, in time order. Fills `live`: blocks that are allocated at the end, with their frames."""
    calls = iter(replayed.driver_calls)
    next_call = next(calls, None)
    num_events = len(replayed.allocated)
    entries = []

    def add(action: str, address: int, num_bytes: int, stream: str, frames: Frames, category: str) -> None:
        entries.append(
            {
                "action": action,
                "addr": address,
                "size": num_bytes,
                "stream": streams[stream],
                "time_us": number,
                "frames": frames,
                "category": category,
                "pool_id": _POOL,
            }
        )

    for number, (segment, event) in enumerate(replayed.trace.events()):
        if number == num_events:
            break
        while next_call and next_call[0] == number:
            call = next_call[1]
            add(call.action, call.address, call.num_bytes, call.stream, _frames_of_call(call, segment.point), _UNKNOWN)
            next_call = next(calls, None)
        index = event if event >= 0 else ~event
        block, address = replayed.trace.blocks[index], replayed.addresses[index]
        if event >= 0:
            live[index] = _frames(block)
        actions = ("alloc",) if event >= 0 else _ACTIONS_OF_FREE
        for action in actions:
            add(action, address, block.num_bytes, block.stream, live[index], block.part)
        if event < 0:
            del live[index]
    return entries


def _segments(replayed: Replayed, streams: dict[str, int], live: dict[int, Frames]) -> list[dict[str, Any]]:
    by_address = sorted((replayed.addresses[index], index) for index in live if replayed.addresses[index])
    segments = []
    position = 0
    for begin, end, call in _mapped(replayed):
        blocks, at = [], begin
        while position < len(by_address) and by_address[position][0] < end:
            address, index = by_address[position]
            if at < address:
                blocks.append(_free_block(at, address))
            size, asked = replayed.sizes[index], replayed.trace.blocks[index].num_bytes
            blocks.append(_block(address, size, asked, "active_allocated", live[index]))
            at = address + size
            position += 1
        if at < end:
            blocks.append(_free_block(at, end))
        allocated = [block for block in blocks if block["state"] == "active_allocated"]
        segments.append(
            {
                "device": 0,
                "address": begin,
                "total_size": end - begin,
                "allocated_size": sum(block["size"] for block in allocated),
                "active_size": sum(block["size"] for block in allocated),
                "requested_size": sum(block["requested_size"] for block in allocated),
                "stream": streams[call.stream],
                "segment_type": "small" if call.is_small else "large",
                "segment_pool_id": _POOL,
                "is_expandable": replayed.allocator == "expandable",
                "frames": [],
                "blocks": blocks,
            }
        )
    return segments


def _mapped(replayed: Replayed) -> list[tuple[int, int, DriverCall]]:
    """Begin and end of memory held from the driver at the end, by address; adjacent granules are one segment."""
    pieces: dict[int, tuple[int, DriverCall]] = {}  # begin → size
    for _, call in replayed.driver_calls:
        step = call.num_bytes if replayed.allocator == "classic" else granule(call.is_small)
        for begin in range(call.address, call.address + call.num_bytes, step):
            if call.action in TAKING:
                pieces[begin] = step, call
            else:
                del pieces[begin]
    runs: list[tuple[int, int, DriverCall]] = []
    for begin, (size, call) in sorted(pieces.items()):
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], begin + size, call
        else:
            runs.append((begin, begin + size, call))
    return runs


def _block(address: int, size: int, asked: int, state: str, frames: Frames) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": asked, "state": state, "frames": frames}


def _free_block(begin: int, end: int) -> dict[str, Any]:
    return _block(begin, end - begin, 0, "inactive", [])


def _frames(block: Block) -> Frames:
    return _frames_at(block.part, block.owner or block.point.module, block.point, block.stream)


def _frames_of_call(call: DriverCall, point: StepPoint) -> Frames:
    return _frames_at("driver", "small pool" if call.is_small else "large pool", point, call.stream)


@cache
def _frames_at(part: str, what: str, point: StepPoint, stream: str) -> Frames:
    """Innermost first, as in a stack trace; shown as `filename:line:name`. Cached: a file has each once."""
    lines = (
        (part, what or "-"),
        (point.phase, point.module or "-"),
        (f"step {point.step}", f"stage {point.stage}, microbatch {point.microbatch}"),
        ("stream", stream),
    )
    return [{"filename": filename, "line": 0, "name": name} for filename, name in lines]
