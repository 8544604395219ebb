"""A trace of few layers → the trace of all of them.

Forward, backward, updates and all else that passes over the layers are sweeps: runs of pieces about consecutive layers.
The first and last layers of a sweep copy themselves, and each one in between copies the layer of the same kind in the
first captured period. What a copy frees of a layer near its own moves along with it; what it frees of the first or last
layers stays there. That this is right is not assumed: the captured trace must come out of its own first period, event
for event, before any is trusted (and `play` checks every free).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from titan_tools.memory.trace.events import NO_LAYER, PER_PARAMETER, Block, Trace
from titan_tools.memory.trace.expand.depth import Depth
from titan_tools.memory.trace.expand.templates import Aperiodic, Key, Piece, cut, play

_REACH = 2  # layers: how far from its own a layer may free what moves along with it


def expand_layers(trace: Trace, depths: Sequence[Depth]) -> Trace:
    """The trace of a rank whose stages have the wanted depths, from the captured ones. Raises Aperiodic."""
    _check_states_are_owned(trace)
    pieces = cut(trace)
    depths = [depth if depth.surplus else replace(depth, is_whole=True) for depth in depths]
    proof = _expanded(pieces, [replace(depth, wanted=depth.captured) for depth in depths])
    if replace(proof, symmetric_bytes=trace.symmetric_bytes) != trace:
        raise Aperiodic("captured layers of one kind differ")
    return replace(_expanded(pieces, depths), symmetric_bytes=trace.symmetric_bytes)


def _expanded(pieces: Sequence[Piece], depths: Sequence[Depth]) -> Trace:
    stage_of = {number: depth for depth in depths for number in depth.captured}

    def moved(source: int, target: int, number: int) -> int:
        """The layer that is to a copy of layer `source` at `target` what layer `number` is to `source`."""
        depth = stage_of[number]
        if source != NO_LAYER and stage_of[source] is depth and abs(number - source) <= _REACH:
            return target + number - source
        if (index := depth.anchored(number - depth.captured.start)) is None:
            raise Aperiodic(f"layer {source} frees what layer {number} made, which is neither near nor at an end")
        return depth.wanted[index]

    def translated(source: Key, target: Key, reference: Key) -> Key:
        if reference.layer == NO_LAYER:
            return reference
        return reference._replace(layer=moved(source.layer, target.layer, reference.layer))

    def resized(block: Block) -> int:
        return _bytes_of_all_parameters(block, depths) if block.owner.startswith(PER_PARAMETER) else block.num_bytes

    sequence = []
    for depth, run in _runs(pieces, stage_of):
        if depth is None:
            sequence += [(piece.key, piece) for piece in run]
        else:
            sequence += _deepened(run, depth)
    _check_all_are_there(pieces, sequence, depths)
    return play(sequence, translated, layer=moved, resize=resized)


def _runs(pieces: Sequence[Piece], stage_of: dict[int, Depth]) -> Iterator[tuple[Depth | None, list[Piece]]]:
    """Pieces in time order, together where they pass over consecutive layers of a stage in one direction."""
    run: list[Piece] = []
    direction = 0
    for piece in pieces:
        layer = piece.key.layer
        if run:
            last = run[-1].key
            step = layer - last.layer
            goes_on = (
                NO_LAYER not in (layer, last.layer)
                and piece.key[:4] == last[:4]  # all of a place but the module
                and stage_of[layer] is stage_of[last.layer]
                and (step == 0 or step in (1, -1) and direction in (0, step))
            )
            if not goes_on:
                yield stage_of.get(run[0].key.layer), run
                run, direction = [], 0
            elif step:
                direction = step
        run.append(piece)
    if run:
        yield stage_of.get(run[0].key.layer), run


def _deepened(run: Sequence[Piece], depth: Depth) -> Iterator[tuple[Key, Piece]]:
    """The pieces of a run over captured layers → those over the wanted ones, each with its key."""
    start = depth.captured.start
    by_index = {number - start: list(found) for number, found in groupby(run, lambda piece: piece.key.layer)}
    indices = list(by_index)
    if depth.spans(min(indices), max(indices)):
        wanted = [(index, depth.template(index)) for index in range(min(indices), max(indices) + depth.surplus + 1)]
        if indices[0] > indices[-1]:
            wanted.reverse()
    else:
        wanted = [(depth.anchored(index), index) for index in indices]
    for index, template in wanted:
        if index is None or template not in by_index:
            raise Aperiodic(f"{run[0].key} to {run[-1].key} pass over some of the layers in between")
        for piece in by_index[template]:
            yield piece.key._replace(layer=depth.wanted[index]), piece


def _check_all_are_there(
    pieces: Sequence[Piece], sequence: Sequence[tuple[Key, Piece]], depths: Sequence[Depth]
) -> None:
    """Every wanted layer has each piece that the layer has that it copies: no pass over the layers was overlooked."""
    captured, wanted = defaultdict(set), defaultdict(set)
    for keys, found in ((captured, (piece.key for piece in pieces)), (wanted, (key for key, _ in sequence))):
        for key in found:
            keys[key.layer].add(key._replace(layer=NO_LAYER))
    for depth in depths:
        for index, number in enumerate(depth.wanted):
            if wanted[number] != captured[depth.captured[depth.template(index)]]:
                raise Aperiodic(f"something passes over layer {number} otherwise than over the one that it copies")


def _check_states_are_owned(trace: Trace) -> None:
    """What an optimizer keeps belongs to parameters: of what does not, nobody could say how much deeper models have."""
    freed = {~event for _, event in trace.events() if event < 0}
    for number, block in enumerate(trace.blocks):
        if block.place.phase in ("states", "optimizer") and number not in freed and not block.owner:
            raise Aperiodic(f"the optimizer keeps {block.num_bytes} bytes that belong to no parameter")


def _bytes_of_all_parameters(block: Block, depths: Sequence[Depth]) -> int:
    """The size of a block that holds a number for each of many parameters: record/owners.py says whose."""
    if not any(depth.surplus for depth in depths):
        return block.num_bytes
    if block.owner == PER_PARAMETER:
        raise Aperiodic(f"a block of {block.num_bytes} bytes is made of many, some layers' more than others'")
    counts, _, part = block.owner.removeprefix(PER_PARAMETER).partition("@")
    outside, per_layer = map(int, counts.split("+"))
    if part:
        depths = [depths[int(part)]]
    captured = outside + per_layer * sum(len(depth.captured) for depth in depths)
    wanted = outside + per_layer * sum(len(depth.wanted) for depth in depths)
    if block.num_bytes % captured:
        raise Aperiodic(f"a block of {block.num_bytes} bytes does not hold {captured} numbers")
    return block.num_bytes * wanted // captured
