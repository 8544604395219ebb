"""A trace cut into pieces whose frees are relative references, so that pieces can be copied to other layers.

A piece is a run of events at one point about one layer (or none). A block that outlives its piece has a name: its
number among the piece's outliving blocks of its size and stream. So a free is a reference to a piece and a name. To
expand a trace:

1. `cut(trace)` returns the pieces in time order, each with a `PieceKey`.
2. Choose the sequence of pieces of the larger trace: for each its new key, and the piece that it copies.
3. `play(sequence, translate)` writes the larger trace. `translate(source, target, reference)` returns the key under
   which the copy of `source` at `target` finds what `source` finds under `reference`: relative references move along
   (the layer below, the same microbatch's forward), others stay (the embedding's output).

`play` checks that each free finds an allocated block of the right size and stream, and that a copy keeps until the end
exactly what its source keeps. Otherwise it raises Aperiodic, and only a full capture is right.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_tools.memory.trace.events import NO_LAYER, Block, StepPoint, Trace, TraceSegment, layer_of

_ANY_LAYER = "layers.*"


class BlockName(NamedTuple):
    """A block that outlives its piece: the `number`-th of its size and stream."""

    num_bytes: int
    stream: str
    number: int


class Aperiodic(Exception):
    """The pieces of a trace do not repeat."""


class PieceKey(NamedTuple):
    """The identity of a piece: a StepPoint with its layer separate, and how many pieces of the same came before."""

    step: int
    phase: str
    stage: int
    microbatch: int
    module: str  # "layers.*" within a layer
    layer: int  # that runs; outside of layers, of the blocks that are allocated or freed; or NO_LAYER
    time: int = 0

    @property
    def point(self) -> StepPoint:
        module = f"layers.{self.layer}" if self.module == _ANY_LAYER else self.module
        return StepPoint(self.step, self.phase, self.stage, self.microbatch, module)


@dataclass(slots=True)
class TracePiece:
    """Events of one key.

    `events`: (-1, i) allocates blocks[i]; (r, name) frees the block of that name of the piece references[r], or, if
    that is this piece itself, (r, i) frees blocks[i]. A block's owner is stored as (layer or NO_LAYER, FQN with "*" for
    that layer).
    """

    key: PieceKey
    blocks: list[Block] = field(default_factory=list)
    owners: list[tuple[int, str]] = field(default_factory=list)
    references: list[PieceKey] = field(default_factory=list)
    events: list[tuple[int, Any]] = field(default_factory=list)
    freed: list[Block] = field(default_factory=list)  # by each free, in order
    outlive: dict[BlockName, int] = field(default_factory=dict)  # name → index
    kept: set[int] = field(default_factory=set)  # indices of the blocks that are never freed


def cut(trace: Trace) -> list[TracePiece]:
    """The pieces of a trace in time order.

    Events outside of layers are about a layer too: an allocation about that of the block's owner, a free about the
    block's. So updates, clipping and zeroing of gradients pass over the layers as forward and backward do.
    """
    pieces: list[TracePiece] = []
    times: Counter[PieceKey] = Counter()
    homes: list[tuple[TracePiece, int]] = []  # of each block: its piece, and its number there
    about: list[int] = []  # the layer of each block
    for segment in trace.segments:
        point = segment.point
        in_layer = layer_of(point.module)
        module = point.module if in_layer == NO_LAYER else _ANY_LAYER
        piece: TracePiece | None = None
        slots: dict[PieceKey, int] = {}
        for event, layer in zip(segment.events, _layers(segment, trace.blocks, about), strict=True):
            if piece is None or piece.key.layer != layer:
                key = PieceKey(point.step, point.phase, point.stage, point.microbatch, module, layer)
                piece, slots = TracePiece(key._replace(time=times[key])), {}
                times[key] += 1
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
    """Replace the indices of other pieces' freed blocks by names."""
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
    """The layer that each event of a segment is about. Appends that of each allocated block to `about`."""
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
            # a loop over parameters frees what it made for one parameter while it is at the next
            between = layers[last + 1 : position]
            layers[last + 1 : position] = [layer if one in (NO_LAYER, layer - 1, layer + 1) else one for one in between]
        last = position
    return layers


def play(
    sequence: Iterable[tuple[PieceKey, TracePiece]],
    translate: Callable[[PieceKey, PieceKey, PieceKey], PieceKey],
    *,
    layer: Callable[[int, int, int], int],
    resize: Callable[[Block], int],
) -> Trace:
    """The trace of copies of pieces, each under the key given.

    `layer(source's, target's, an owner's)`: the layer of a copied block's owner; `resize`: the bytes of a copied block.
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
            raise Aperiodic(f"{target} occurs twice")
        source, point = piece.key, target.point
        new_numbers: list[int] = []
        numbers[target] = new_numbers
        played.append((target, piece))
        numbers_by_slot: list[Any] = []  # numbers of this piece's own blocks by index, or of another's by name
        for reference in piece.references:
            key = translate(source, target, reference)
            if key != target and key not in outliving:
                raise Aperiodic(f"{target} frees a block of {key}, which does not exist")
            numbers_by_slot.append(new_numbers if key == target else outliving[key])
        if not segments or segments[-1].point != point:
            segments.append(TraceSegment(point))
        events = segments[-1].events
        freed = iter(piece.freed)
        for slot, number in piece.events:
            if slot < 0:
                block = piece.blocks[number]
                of, owner = piece.owners[number]
                if of != NO_LAYER:
                    owner = owner.replace("*", str(layer(source.layer, target.layer, of)), 1)
                new = len(blocks)
                blocks.append(Block(resize(block), block.stream, block.part, point, owner))
                is_live.append(True)
                new_numbers.append(new)
                events.append(new)
            else:
                like, slot_numbers = next(freed), numbers_by_slot[slot]
                freeing = slot_numbers[number] if slot_numbers is new_numbers else slot_numbers.get(number)
                if freeing is None or not is_live[freeing]:
                    raise Aperiodic(
                        f"{target} frees block {number} of {piece.references[slot]}, which is not allocated"
                    )
                block = blocks[freeing]
                if block.num_bytes != resize(like) or block.stream != like.stream:
                    raise Aperiodic(f"{target} frees a block of {block.num_bytes} bytes for one of {like.num_bytes}")
                is_live[freeing] = False
                events.append(~freeing)
        outliving[target] = {name: new_numbers[index] for name, index in piece.outlive.items()}
    for target, piece in played:
        if {i for i, number in enumerate(numbers[target]) if is_live[number]} != piece.kept:
            raise Aperiodic(f"{target} keeps other blocks than {piece.key}")
    return trace


def _split_owner(owner: str) -> tuple[int, str]:
    if (layer := layer_of(owner)) == NO_LAYER:
        return layer, owner
    return layer, owner.replace(str(layer), "*", 1)
