"""One step of a replayed trace as columns of a picture: bytes by part after its events, and its phases."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from titan_tools.memory.replay.replay import Replayed
from titan_tools.memory.trace.events import Place

_MOST_COLUMNS = 3000  # more events than this share columns; of each the event is drawn that has most allocated
# A column is as wide as its event's bytes, and as this share of an average event's: small ones are seen, too
_LEAST_WIDTH = 0.15


class Band(NamedTuple):
    """Where a phase of one microbatch and stage is drawn."""

    begin: float
    end: float
    place: Place


@dataclass(slots=True)
class Columns:
    """A step from left (0) to right (1). Column i reaches from x[i] to x[i + 1]; bytes are those after its event."""

    x: list[float]  # one more than there are columns
    by_part: dict[str, list[int]]  # in the order asked for, without parts that the step never has
    allocated: list[int]
    reserved: list[int]
    bands: list[Band]
    peak: int  # the column with most allocated
    peak_place: Place


def tell_columns(replayed: Replayed, parts: Sequence[str], *, step: int) -> Columns:
    """Columns of a step, of the parts given: all that it has. Raises ValueError if the replay has no such step."""
    number_of = {part: row for row, part in enumerate(parts)}
    blocks = replayed.trace.blocks
    held = np.zeros((len(parts), 1), dtype=np.int64)
    rows, deltas, places = [], [], []
    first = 0
    for number, (segment, event) in enumerate(replayed.trace.events()):
        if segment.place.step > step or number == len(replayed.allocated):
            break
        block = event if event >= 0 else ~event
        row = number_of[blocks[block].part]
        delta = replayed.sizes[block] if event >= 0 else -replayed.sizes[block]
        if segment.place.step < step:
            held[row] += delta
            first = number + 1
        else:
            rows.append(row)
            deltas.append(delta)
            places.append(segment.place)
    if not rows:
        raise ValueError(f"the replay has no step {step}")
    change = np.zeros((len(parts), len(rows)), dtype=np.int64)
    change[rows, np.arange(len(rows))] = deltas
    by_part = held + change.cumsum(axis=1)
    allocated = by_part.sum(axis=0)
    widths = np.abs(np.array(deltas, dtype=np.float64))
    widths += max(widths.mean(), 1.0) * _LEAST_WIDTH
    ends = np.concatenate([[0.0], widths.cumsum() / widths.sum()])
    starts, kept = _highest_of_each(allocated, -(-len(rows) // _MOST_COLUMNS))
    peak = int(allocated[kept].argmax())
    return Columns(
        [*ends[starts].tolist(), 1.0],
        {part: by_part[row, kept].tolist() for part, row in number_of.items() if by_part[row].any()},
        allocated[kept].tolist(),
        [replayed.reserved[first + event] for event in kept],
        _bands(places, ends),
        peak,
        places[kept[peak]],
    )


def _highest_of_each(allocated: Any, width: int) -> tuple[list[int], list[int]]:
    """Of each `width` neighbours the first, and the highest: no peak is lost."""
    starts = list(range(0, len(allocated), width))
    return starts, [start + int(allocated[start : start + width].argmax()) for start in starts]


def _bands(places: Sequence[Place], ends: Any) -> list[Band]:
    bands: list[Band] = []
    last = None
    for number, place in enumerate(places):
        kind = place.phase, place.microbatch, place.stage
        if kind == last:
            bands[-1] = bands[-1]._replace(end=float(ends[number + 1]))
        else:
            bands.append(Band(float(ends[number]), float(ends[number + 1]), place))
        last = kind
    return bands
