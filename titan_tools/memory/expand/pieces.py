"""A trace cut into pieces that name what they free relative to where they stand, so that they can be played elsewhere.

A piece is a run of events at one place about one layer (or none). A block that outlives its piece is named by it, and
by its number among those of its size that do, whatever else comes and goes there; so a free is a reference to a piece
and a name. To expand a trace:

1. `cut(trace)` gives the pieces in time order, each under a `Key`.
2. Decide the sequence of pieces of the larger trace: for each the key that it is to have, and the piece that it copies.
3. `play(sequence, translate)` writes the larger trace. `translate(source, target, reference)` says under which key the
   copy of `source` that stands at `target` finds what `source` finds under `reference`: what is relative moves along
   (the layer below, the same microbatch's forward), what is not stays (the embedding's output).

`play` proves what it can: each free finds a block of the right size and stream that is allocated at that moment, and a
copy keeps until the end exactly what its source keeps. Else it raises Aperiodic, and only a full capture will do.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titan_tools.memory.trace.events import NO_LAYER, Block, StepPoint, Trace, TraceSegment, layer_of

_ANY_LAYER = "layers.*"


class BlockName(NamedTuple):
    """A block that outlives its piece: the so many-th of its size and stream."""

    num_bytes: int
    stream: str
    number: int


class Aperiodic(Exception):
    """A trace whose pieces do not repeat as they would have to."""


class PieceKey(NamedTuple):
    """What a piece goes by: a Place whose layer stands apart, and how many of the same came before."""

    step: int
    phase: str
    stage: int
    microbatch: int
    module: str  # "layers.*" within a layer
    layer: int  # the number of the layer that runs; outside of layers, of the one whose blocks come or go; or NO_LAYER
    time: int = 0

    @property
    def point(self) -> StepPoint:
        module = f"layers.{self.layer}" if self.module == _ANY_LAYER else self.module
        return StepPoint(self.step, self.phase, self.stage, self.microbatch, module)


@dataclass(slots=True)
class TracePiece:
    """Events of one key.

    `events`: (-1, i) allocates blocks[i]; (r, name) frees the block of that Name of the piece references[r], or, where
    that is this piece itself, (r, i) frees blocks[i]. A block's owner is kept as (layer or NO_LAYER, FQN with "*" for
    that layer).
    """

    key: PieceKey
    blocks: list[Block] = field(default_factory=list)
    owners: list[tuple[int, str]] = field(default_factory=list)
    references: list[PieceKey] = field(default_factory=list)
    events: list[tuple[int, int | BlockName]] = field(default_factory=list)
    freed: list[Block] = field(default_factory=list)  # by each event that frees, in turn
    outlive: dict[BlockName, int] = field(default_factory=dict)  # name → index
    kept: set[int] = field(default_factory=set)  # indices of the blocks that are never freed


def cut(trace: Trace) -> list[TracePiece]:
    """The pieces of a trace in time order.

    What happens outside of layers is about the layer of the block's owner where it allocates, of the block where it
    frees: updates, clipping, zeroing of gradients pass over the layers as forward and backward do.
    """
    pieces: list[TracePiece] = []
    times: dict[tuple, int] = {}
    homes: list[tuple[TracePiece, int]] = []  # of each block: its piece, and its number there
    about: list[int] = []  # the layer of each block
    for segment in trace.segments:
        point = segment.point
        in_layer = layer_of(point.module)
        module = point.module if in_layer == NO_LAYER else _ANY_LAYER
        piece = None
        for event, layer in zip(segment.events, _layers(segment, trace.blocks, about), strict=True):
            if piece is None or piece.key.layer != layer:
                key = (point.step, point.phase, point.stage, point.microbatch, module, layer)
                times[key] = time = times.get(key, -1) + 1
                piece, slots = TracePiece(PieceKey(*key, time)), {}
                pieces.append(piece)
            if event >= 0:
                number = len(piece.blocks)
                homes.append((piece, number))
                piece.events.append((-1, number))
                piece.kept.add(number)
                piece.blocks.append(trace.blocks[event])
                piece.owners.append(_split_owner(trace.blocks[event].owner))
            else:
                home, number = homes[~event]
                if (slot := slots.get(home.key)) is None:
                    slots[home.key] = slot = len(piece.references)
                    piece.references.append(home.key)
                piece.events.append((slot, number))
                piece.freed.append(trace.blocks[~event])
                home.kept.discard(number)
    _name_what_outlives(pieces)
    return pieces


def _name_what_outlives(pieces: Sequence[TracePiece]) -> None:
    """Frees of other pieces' blocks, so far by index → by name."""
    names: dict[PieceKey, dict[int, BlockName]] = {}
    for piece in pieces:
        within = {i for slot, i in piece.events if slot >= 0 and piece.references[slot] == piece.key}
        count: Counter[tuple[int, str]] = Counter()
        for index, block in enumerate(piece.blocks):
            if index not in within:
                kind = block.num_bytes, block.stream
                piece.outlive[BlockName(*kind, count[kind])] = index
                count[kind] += 1
        names[piece.key] = {index: name for name, index in piece.outlive.items()}
        homes = [None if key == piece.key else names[key] for key in piece.references]
        piece.events = [
            (slot, i) if slot < 0 or (home := homes[slot]) is None else (slot, home[i]) for slot, i in piece.events
        ]


def _layers(segment: TraceSegment, blocks: Sequence[Block], about: list[int]) -> list[int]:
    """The layer that each event of a segment is about. `about` grows by that of each block that is allocated."""
    in_layer = layer_of(segment.point.module)
    if in_layer != NO_LAYER:
        about += [in_layer for event in segment.events if event >= 0]
        return [in_layer] * len(segment.events)
    layers, last = [], None  # `last`: the position of the last allocation
    for position, event in enumerate(segment.events):
        if event < 0:
            layers.append(about[~event])
            continue
        layer = layer_of(blocks[event].owner)
        about.append(layer)
        layers.append(layer)
        if last is not None and layer == layers[last] != NO_LAYER:
            # a loop over parameters lets go of what it made of the one before while it is at the next
            between = layers[last + 1 : position]
            layers[last + 1 : position] = [layer if one in (NO_LAYER, layer - 1, layer + 1) else one for one in between]
        last = position
    return layers


Translate = Callable[[PieceKey, PieceKey, PieceKey], PieceKey]


def play(
    sequence: Iterable[tuple[PieceKey, TracePiece]],
    translate: Translate,
    *,
    layer: Callable[[int, int, int], int] | None = None,
    resize: Callable[[Block], int] = lambda block: block.num_bytes,
) -> Trace:
    """The trace of copies of pieces, each under the key given.

    `layer(source's, target's, an owner's)`: the layer of a copied block's owner; `resize`: bytes of a copied block.
    Raises Aperiodic.
    """
    trace = Trace()
    blocks, segments = trace.blocks, trace.segments
    numbers: dict[PieceKey, list[int]] = {}  # the numbers of each played piece's blocks
    outliving: dict[PieceKey, dict[BlockName, int]] = {}
    played: list[tuple[PieceKey, TracePiece]] = []
    is_live = bytearray()
    for target, piece in sequence:
        if target in numbers:
            raise Aperiodic(f"{target} comes twice")
        source, point = piece.key, target.point
        numbers[target] = own = []
        played.append((target, piece))
        found = []
        for reference in piece.references:
            key = translate(source, target, reference)
            if (theirs := own if key == target else outliving.get(key)) is None:
                raise Aperiodic(f"{target} frees what {key} would have made, which is not there")
            found.append(theirs)
        if not segments or segments[-1].point != point:
            segments.append(TraceSegment(point))
        events = segments[-1].events
        freed = iter(piece.freed)
        for slot, number in piece.events:
            if slot < 0:
                block = piece.blocks[number]
                of, owner = piece.owners[number]
                if of != NO_LAYER:
                    owner = owner.replace("*", str(of if layer is None else layer(source.layer, target.layer, of)), 1)
                new = len(blocks)
                blocks.append(Block(resize(block), block.stream, block.part, point, owner))
                is_live.append(True)
                own.append(new)
                events.append(new)
            else:
                like, theirs = next(freed), found[slot]
                freeing = theirs[number] if theirs is own else theirs.get(number)
                if freeing is None or not is_live[freeing]:
                    raise Aperiodic(f"{target} frees block {number} of {piece.references[slot]}'s, which is not there")
                block = blocks[freeing]
                if block.num_bytes != resize(like) or block.stream != like.stream:
                    raise Aperiodic(f"{target} frees a block of {block.num_bytes} bytes for one of {like.num_bytes}")
                is_live[freeing] = False
                events.append(~freeing)
        outliving[target] = {name: own[index] for name, index in piece.outlive.items()}
    for target, piece in played:
        if {i for i, number in enumerate(numbers[target]) if is_live[number]} != piece.kept:
            raise Aperiodic(f"{target} keeps other blocks than {piece.key}")
    return trace


def _split_owner(owner: str) -> tuple[int, str]:
    if (layer := layer_of(owner)) == NO_LAYER:
        return layer, owner
    return layer, owner.replace(str(layer), "*", 1)
