"""A trace: the blocks that a rank allocates on its GPU, and the events that allocate or free them, in time order.

Torch-free: traces are captured with torch, and expanded, replayed and drawn without.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

# What memory is used for: every byte counts to one of these
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "recompute",
    "logits_and_loss",
    "all_gather",
    "reduce_scatter",
    "pipeline_buffers",
    "workspaces",
    "other",
)
COMPUTE = "compute"  # the default stream
NO_LAYER = -1
PER_PARAMETER = "*"  # the owner of a block with one number per parameter of the rank starts with this
_LAYERS = "layers."


def layer_of(fqn: str) -> int:
    """The layer that an FQN is in, NO_LAYER if none."""
    if not fqn.startswith(_LAYERS):
        return NO_LAYER
    number = fqn[len(_LAYERS) :].partition(".")[0]
    return int(number) if number.isdecimal() else NO_LAYER


def repetition(values: list[Any]) -> tuple[int, int]:
    """(period, number of first values that do not repeat): the pair for which the first values and two periods are the
    fewest.
    """
    pairs = ((period, needed - 2 * period) for needed in count(2) for period in range(needed // 2, 0, -1))
    return next(
        (period, alone) for period, alone in pairs if values[alone + period :] == values[alone : len(values) - period]
    )


class StepPoint(NamedTuple):
    """A point of a step. All events of a segment are at one point; a point may occur again within a step."""

    step: int  # 0: before the first; then from 1
    phase: str  # build, states, one of tracking.py's PHASES, clip, optimizer, zero_grad, validation
    stage: int = 0
    microbatch: int = 0  # within a step, over all accumulated batches; -1: none
    module: str = ""  # FQN: tok_embeddings, layers.N, norm, output; "" outside of the model


@dataclass(slots=True)
class Block:
    """One allocation."""

    num_bytes: int  # as requested; the allocator rounds
    stream: str  # whose pool it is from
    part: str  # one of PARTS
    point: StepPoint  # at which it was allocated
    owner: str = ""  # FQN of its parameter or module, if known


@dataclass(slots=True)
class TraceSegment:
    """Events at one place: number b allocates blocks[b], ~b frees it."""

    point: StepPoint
    events: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """A rank's run from build to the end of a steady step. Some blocks are never freed."""

    blocks: list[Block] = field(default_factory=list)
    segments: list[TraceSegment] = field(default_factory=list)
    symmetric_bytes: int = 0  # outside of the allocator: the workspace through which ranks copy

    def events(self) -> Iterator[tuple[TraceSegment, int]]:
        """All events in time order, each with its segment."""
        for segment in self.segments:
            for event in segment.events:
                yield segment, event
