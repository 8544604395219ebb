"""A trace of few layers → the trace of all of them.

Forward, backward, updates and everything else that passes over the layers are sweeps: runs of pieces about consecutive
layers. The first and last layers of a sweep copy themselves, and so do first ones of kinds that do not come again, as
dense layers before those with experts; each one in between copies the layer of the same kind in the first captured
period. What a copy frees of a nearby layer moves along with it; what it frees of the first or last
layers stays. This is checked, not assumed: the captured trace must follow from its own first period, event for event,
before any is used (and `play` checks every free).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, groupby, islice
from typing import NamedTuple

from titan_tools.memory.expand.pieces import Aperiodic, PieceKey, TracePiece, cut, play
from titan_tools.memory.trace.events import NO_LAYER, PER_PARAMETER, Block, Trace, layer_of, repetition
from trainer.job.record import Job
from trainer.parallel.float8 import float8_filters, is_float8

# Layers that may differ from those in the middle: at either end the embedding or the loss, or a layer of another kind,
# is their neighbour.
_NUM_HEAD = _NUM_TAIL = 1
_REACH = 2  # layers: how far from its own a layer may free what moves along with it


class Repetition(NamedTuple):
    """How the layers of a stage repeat: with a period, after `alone` layers that do not."""

    period: int = 1
    alone: int = 0

    @property
    def head(self) -> int:
        """How many first layers stand for themselves only."""
        return self.alone + _NUM_HEAD

    def captured_layers(self, num_layers: int) -> int:
        """How many layers stand for `num_layers`: both ends and two periods, equal to it modulo the period."""
        fewest = self.head + 2 * self.period + _NUM_TAIL
        return min(num_layers, fewest + (num_layers - fewest) % self.period)


@dataclass(frozen=True, slots=True)
class Depth:
    """The layers of one stage in the captured model and in the wanted one. Indices count from the stage's first layer.

    Captured and wanted ones start and end at the same offset in a period.
    """

    captured: range
    wanted: range
    repeats: Repetition = Repetition()
    is_whole: bool = False  # each layer is its own template

    @property
    def surplus(self) -> int:
        """How many layers to add."""
        return len(self.wanted) - len(self.captured)

    @property
    def _tail(self) -> int:
        """The first index of the layers that differ from those in the middle."""
        middle = len(self.captured) - self.repeats.head - _NUM_TAIL
        return len(self.captured) - _NUM_TAIL - middle % self.repeats.period

    def template(self, index: int) -> int:
        """The captured layer that a wanted one copies."""
        period, head = self.repeats.period, self.repeats.head
        if index < head or self.is_whole:
            return index
        if index >= self._tail + self.surplus:
            return index - self.surplus
        return head + (index - head) % period

    def covers_all(self, first: int, last: int) -> bool:
        """Whether captured layers from `first` to `last` stand for all, except perhaps the first and the last one."""
        return self.is_whole or first <= self.repeats.head and last >= self._tail - 1

    def fixed_index(self, index: int) -> int | None:
        """The wanted layer of a captured one at an end, or next to it; None for one in the middle."""
        if index <= self.repeats.head or self.is_whole:
            return index
        return index + self.surplus if index >= self._tail - 1 else None


@dataclass(frozen=True, slots=True)
class Shallow:
    """A job with few layers, and how the rank's layers in it relate to those of the whole job."""

    job: Job
    depths: tuple[Depth, ...]  # of the rank's stages that hold layers


def shallow_model(job: Job, *, rank: int) -> Shallow | None:
    """The shallowest job that stands for this one; each stage is cut by itself. None if none would be shallower.

    Layers that differ (in their parameters, in what they compute, in what float8 converts of them) repeat with their
    period, or all run.
    """
    repeats, whole = repetitions(job), job.split
    modules = tuple(_cut_stage(stage, how) for stage, how in zip(whole.modules, repeats, strict=True))
    if modules == whole.modules:
        return None
    held = [stage for stage in whole.stages_of(job.dims.coordinates(rank).pp) if _layers(whole.modules[stage])]
    depths = tuple(Depth(_layers(modules[stage]), _layers(whole.modules[stage]), repeats[stage]) for stage in held)
    return Shallow(replace(job, split=replace(whole, modules=modules)), depths)


def repetitions(job: Job) -> list[Repetition]:
    """How the layers of each stage repeat.

    The first layer of each kind of attention stands for itself: its backward frees what only its kind reads, such as
    masks.
    """
    kinds = kinds_of_layers(job)
    attentions: Sequence[object] = [block.attention for block in job.family.blocks(job.args)] or kinds
    found = []
    for modules in job.split.modules:
        held = _layers(modules)
        period, alone = repetition([kinds[number] for number in held])
        own = [attentions[number] for number in held]
        found.append(Repetition(period, max([alone, *map(own.index, own)])))
    return found


def kinds_of_layers(job: Job) -> list[int]:
    """Number of each layer's kind: what it computes, its parameters, and whether it is recomputed."""
    settings = job.config.activation_checkpoint
    every = 1
    if settings.mode == "selective" and settings.selective_ac_option != "op":
        every = int(settings.selective_ac_option)
    kinds = [(block, number % every) for number, block in enumerate(_blocks(job))]
    return [kinds.index(kind) for kind in kinds]


def _blocks(job: Job) -> list[object]:
    """What each layer computes, and its parameters."""
    filters = float8_filters(job.config.float8, job.config.training) if is_float8(job.config.model) else ()
    parameters = job.family.parameters(job.args)
    blocks: list[list[object]] = [[block] for block in job.family.blocks(job.args)]
    if not blocks:  # nothing says which layers of a model that is no decoder compute the same: all run
        numbers = [parameter.layer for parameter in parameters if parameter.layer is not None]
        blocks = [[number] for number in range(max(numbers, default=-1) + 1)]
    for parameter in parameters:
        if (layer := parameter.layer) is not None:
            name = parameter.fqn.partition(f"{layer}.")[2]
            is_filtered = any(part in parameter.fqn for part in filters)
            blocks[layer].append((name, parameter.shape, parameter.role, parameter.tp_dim, is_filtered))
    return list(blocks)


def _cut_stage(modules: Sequence[str], how: Repetition) -> tuple[str, ...]:
    """A stage's modules with its first layers only, as many as stand for all of them, under their own numbers."""
    layers = _layers(modules)
    kept = layers[: how.captured_layers(len(layers))]
    return tuple(name for name in modules if (number := layer_of(name)) == NO_LAYER or number in kept)


def _layers(modules: Sequence[str]) -> range:
    numbers = [layer_of(name) for name in modules if layer_of(name) != NO_LAYER]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def expand_layers(trace: Trace, depths: Sequence[Depth]) -> Trace:
    """The trace of a rank whose stages have the wanted depths, from the captured ones. Raises Aperiodic."""
    _check_states_are_owned(trace)
    pieces = cut(trace)
    depths = [depth if depth.surplus else replace(depth, is_whole=True) for depth in depths]
    proof = _expanded(pieces, [replace(depth, wanted=depth.captured) for depth in depths])
    if replace(proof, symmetric_bytes=trace.symmetric_bytes) != trace:
        raise Aperiodic("captured layers of one kind differ")
    return replace(_expanded(pieces, depths), symmetric_bytes=trace.symmetric_bytes)


def _expanded(pieces: Sequence[TracePiece], depths: Sequence[Depth]) -> Trace:
    stage_of = {number: depth for depth in depths for number in depth.captured}

    def moved(source: int, target: int, number: int) -> int:
        """The layer that is to a copy of layer `source` at `target` what layer `number` is to `source`."""
        depth = stage_of[number]
        if source != NO_LAYER and stage_of[source] is depth and abs(number - source) <= _REACH:
            return target + number - source
        if (index := depth.fixed_index(number - depth.captured.start)) is None:
            raise Aperiodic(f"layer {source} frees what layer {number} made, which is neither near nor at an end")
        return depth.wanted[index]

    def translated(source: PieceKey, target: PieceKey, reference: PieceKey) -> PieceKey:
        if reference.layer == NO_LAYER:
            return reference
        return reference._replace(layer=moved(source.layer, target.layer, reference.layer))

    def resized(block: Block) -> int:
        return _bytes_of_all_parameters(block, depths) if block.owner.startswith(PER_PARAMETER) else block.num_bytes

    sequence: list[tuple[PieceKey, TracePiece]] = []
    for depth, sweep in _sweeps(pieces, stage_of):
        if depth is None:
            sequence += [(piece.key, piece) for piece in sweep]
        else:
            sequence += _deepened(sweep, depth)
    _check_all_are_there(pieces, sequence, depths)
    return play(sequence, translated, layer=moved, resize=resized)


def _sweeps(
    pieces: Sequence[TracePiece], stage_of: dict[int, Depth]
) -> Iterator[tuple[Depth | None, list[TracePiece]]]:
    """Pieces in time order, together where they pass over consecutive layers of a stage in one direction."""
    sweep: list[TracePiece] = []
    direction = 0
    for piece in pieces:
        layer = piece.key.layer
        if sweep:
            last = sweep[-1].key
            step = layer - last.layer
            continues = (
                NO_LAYER not in (layer, last.layer)
                and piece.key[:4] == last[:4]  # all of a point but the module
                and stage_of[layer] is stage_of[last.layer]
                and (step == 0 or step in (1, -1) and direction in (0, step))
            )
            if not continues:
                yield stage_of.get(sweep[0].key.layer), sweep
                sweep, direction = [], 0
            elif step:
                direction = step
        sweep.append(piece)
    if sweep:
        yield stage_of.get(sweep[0].key.layer), sweep


def _deepened(sweep: Sequence[TracePiece], depth: Depth) -> Iterator[tuple[PieceKey, TracePiece]]:
    """The pieces of a sweep over captured layers → those over the wanted ones, each with its key."""
    start = depth.captured.start
    by_index = {number - start: list(found) for number, found in groupby(sweep, lambda piece: piece.key.layer)}
    indices = list(by_index)
    wanted: list[tuple[int | None, int]]
    if depth.covers_all(min(indices), max(indices)):
        wanted = [(index, depth.template(index)) for index in range(min(indices), max(indices) + depth.surplus + 1)]
        if indices[0] > indices[-1]:
            wanted.reverse()
    else:
        wanted = [(depth.fixed_index(index), index) for index in indices]
    for index, template in wanted:
        if index is None or template not in by_index:
            raise Aperiodic(f"{sweep[0].key} to {sweep[-1].key} pass over some of the layers in between")
        for piece in by_index[template]:
            yield piece.key._replace(layer=depth.wanted[index]), piece


def _check_all_are_there(
    pieces: Sequence[TracePiece], sequence: Sequence[tuple[PieceKey, TracePiece]], depths: Sequence[Depth]
) -> None:
    """Every wanted layer has each piece of the layer that it copies: no pass over the layers was overlooked."""
    captured: dict[int, set[PieceKey]] = defaultdict(set)
    wanted: dict[int, set[PieceKey]] = defaultdict(set)
    for keys, found in ((captured, (piece.key for piece in pieces)), (wanted, (key for key, _ in sequence))):
        for key in found:
            keys[key.layer].add(key._replace(layer=NO_LAYER))
    for depth in depths:
        for index, number in enumerate(depth.wanted):
            if wanted[number] != captured[depth.captured[depth.template(index)]]:
                raise Aperiodic(f"a sweep treats layer {number} differently from the one that it copies")


def _check_states_are_owned(trace: Trace) -> None:
    """What an optimizer keeps must belong to parameters: only then is its size in a deeper model known."""
    freed = {~event for _, event in trace.events() if event < 0}
    for number, block in enumerate(trace.blocks):
        if block.point.phase in ("states", "optimizer") and number not in freed and not block.owner:
            raise Aperiodic(f"the optimizer keeps {block.num_bytes} bytes that belong to no parameter")


def _bytes_of_all_parameters(block: Block, depths: Sequence[Depth]) -> int:
    """The size of a block that holds a number for each of many parameters, which trace/recorder.py's owner names."""
    if not any(depth.surplus for depth in depths):
        return block.num_bytes
    if block.owner == PER_PARAMETER:
        raise Aperiodic(f"a block of {block.num_bytes} bytes has a number per parameter, and layers differ in theirs")
    counts, _, part = block.owner.removeprefix(PER_PARAMETER).partition("@")
    outside, per_layer = counts.split("+")
    if part:
        depths = [depths[int(part)]]
    captured = wanted = int(outside)
    alone, _, repeated = per_layer.rpartition(";")
    of_layers = map(int, chain(filter(None, alone.split(",")), cycle(repeated.split(","))))
    for depth in depths:
        of_stage = list(islice(of_layers, len(depth.captured)))
        captured += sum(of_stage)
        wanted += sum(of_stage[depth.template(index)] for index in range(len(depth.wanted)))
    if block.num_bytes % captured:
        raise Aperiodic(f"a block of {block.num_bytes} bytes does not hold {captured} numbers")
    return block.num_bytes * wanted // captured
