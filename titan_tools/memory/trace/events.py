"""What one rank asks of its GPU's allocator, in time order: blocks, and segments of events that allocate or free them.

Torch-free: traces are captured with torch, and expanded, replayed and drawn without.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

COMPUTE = "compute"  # the default stream
NO_LAYER = -1
PER_PARAMETER = "*"  # how the owner of a block begins that holds one number for each parameter of the rank
_LAYERS = "layers."


def layer_of(fqn: str) -> int:
    """The layer that an FQN lies in, NO_LAYER if none."""
    if not fqn.startswith(_LAYERS):
        return NO_LAYER
    return int(fqn[len(_LAYERS) :].partition(".")[0])


class StepPoint(NamedTuple):
    """Where a step stands. A segment's events all happen at one place; places may come again within a step."""

    step: int  # 0: before the first; then from 1
    phase: str  # build, forward, backward, weight (of a split backward), reduce, clip, optimizer, zero_grad, validation
    stage: int = 0
    microbatch: int = 0  # within a step, accumulated batches included; -1 where it belongs to none
    module: str = ""  # FQN: tok_embeddings, layers.N, norm, output; "" outside of the model


@dataclass(slots=True)
class Block:
    """One allocation."""

    num_bytes: int  # as asked for; the allocator rounds
    stream: str  # whose pool it comes from
    part: str  # one of parts.py's
    point: StepPoint  # at which it was allocated
    owner: str = ""  # FQN of the parameter, or module, that it belongs to, where that is known


@dataclass(slots=True)
class TraceSegment:
    """Events at one place: number b allocates blocks[b], ~b frees it."""

    point: StepPoint
    events: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """A rank's whole run, from build to the end of a steady step. What is never freed stays."""

    blocks: list[Block] = field(default_factory=list)
    segments: list[TraceSegment] = field(default_factory=list)
    symmetric_bytes: int = 0  # what lies outside of the allocator: the workspace that ranks copy from

    def events(self) -> Iterator[tuple[TraceSegment, int]]:
        """All events in time order, each with its segment."""
        for segment in self.segments:
            for event in segment.events:
                yield segment, event

    def peak_bytes(self, *, steps: range | None = None) -> int:
        """The most that is allocated at once, unrounded, at an instant within `steps` (None: any)."""
        held = highest = 0
        for segment, event in self.events():
            held += self.blocks[event].num_bytes if event >= 0 else -self.blocks[~event].num_bytes
            if held > highest and (steps is None or segment.point.step in steps):
                highest = held
        return highest
