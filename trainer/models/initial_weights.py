"""Initial weights as a function of (seed, FQN, row block), independent of the layout. Torch-free.

A parameter is split into blocks of whole rows; each block has its own random stream, keyed by seed, FQN and block
number. To get a slice, draw the blocks that overlap it: a rank its shard, `titan seed` one box after another.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import numpy as np
import xxhash

from converters.common.box import Box, TensorInfo
from converters.families.parameters import Parameter
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from trainer.models.initialization import Constant, Distribution
from trainer.models.registry import get_trainer_family

# Part of the definition: another size gives other weights for the same seed.
BLOCK_ELEMENTS = 1 << 20
_NUM_CACHED = 8  # blocks, 4 MiB each

Draw = Callable[[Distribution, Sequence[int], str], np.ndarray]  # (distribution, shape, key of the stream) → values


def initial_blocks(
    parameter: Parameter, distribution: Distribution, *, seed: int, box: Box, draw: Draw | None = None
) -> Iterator[tuple[Box, Callable[[], np.ndarray]]]:
    """The initial values of `box`, block by block: (part of the box, function that draws its fp32 values).

    The functions may be called in any order and from several threads. `draw` replaces the drawing of a block, for a
    caller with a cache.
    """
    draw = draw or _draw
    if len(parameter.shape) > 2:  # a stack of experts: each is drawn on its own, so that blocks stay small
        within = Box(box.offsets[1:], box.sizes[1:])
        for number in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
            member = replace(parameter, fqn=f"{parameter.fqn}/{number}", shape=parameter.shape[1:])
            for inner, draw_part in initial_blocks(member, distribution, seed=seed, box=within, draw=draw):
                yield Box((number, *inner.offsets), (1, *inner.sizes)), partial(_as_stack, draw_part)
        return
    rows_per_block = max(1, BLOCK_ELEMENTS // max(1, prod(parameter.shape[1:])))
    first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
    for block in range(first // rows_per_block, -(-last // rows_per_block)):
        start = block * rows_per_block
        rows = min(rows_per_block, parameter.shape[0] - start)
        whole = Box((start,) + (0,) * (len(parameter.shape) - 1), (rows, *parameter.shape[1:]))
        part = whole.intersect(box)
        if part is not None:
            key = f"{seed}/{parameter.fqn}/{block}"
            yield part, partial(_draw_part, draw, distribution, whole, key, part)


def _as_stack(draw: Callable[[], np.ndarray]) -> np.ndarray:
    return draw()[None]


def _draw_part(draw: Draw, distribution: Distribution, whole: Box, key: str, part: Box) -> np.ndarray:
    return draw(distribution, whole.sizes, key)[part.slices_within(whole)]


def _draw(distribution: Distribution, shape: Sequence[int], key: str) -> np.ndarray:
    if isinstance(distribution, Constant):
        return np.full(shape, distribution.value, np.float32)
    stream = np.random.Generator(np.random.Philox(key=xxhash.xxh3_128_intdigest(key.encode())))
    values = stream.standard_normal(shape, np.float32)
    if distribution.cut is not None:
        _draw_again_beyond(values, distribution.cut, stream)
    return values * np.float32(distribution.std)


def _draw_again_beyond(values: np.ndarray, cut: float, stream: np.random.Generator) -> None:
    while (beyond := np.abs(values) > cut).any():
        values[beyond] = stream.standard_normal(int(beyond.sum()), np.float32)


def initial_values(
    parameter: Parameter, distribution: Distribution, *, seed: int, box: Box, draw: Draw | None = None
) -> np.ndarray:
    """The initial values of a box, fp32."""
    values = np.empty(box.sizes, np.float32)
    for part, draw_part in initial_blocks(parameter, distribution, seed=seed, box=box, draw=draw):
        values[part.slices_within(box)] = draw_part()
    return values


def least_cache_bytes(parameters: Sequence[Parameter]) -> int:
    """Bytes that the cache of InitialWeights holds when the blocks of the largest matrix are drawn."""
    matrices = [p.shape[-2:] for p in parameters if len(p.shape) > 1]
    blocks = (
        min(rows, _NUM_CACHED * max(1, BLOCK_ELEMENTS // max(1, columns))) * columns * 4 for rows, columns in matrices
    )
    return max(blocks, default=0)


class InitialWeights:
    """The initial weights of a model as a TensorSource, drawn when they are read, with a cache of a few blocks.

    The copy engine reads boxes that are smaller than blocks, from several threads: without the cache each block would
    be drawn four or more times.
    """

    def __init__(self, info: ModelInfo, *, seed: int):
        parameters = get_family(info.family).parameters(info.args)
        initial_distribution = get_trainer_family(info.family).initial_distribution
        self.tensors: Mapping[str, TensorInfo] = {p.fqn: TensorInfo("float32", p.shape) for p in parameters}
        self._parameters = {p.fqn: p for p in parameters}
        self._distributions = {p.fqn: initial_distribution(p, info.args) for p in parameters}
        self._seed = seed
        self._lock = Lock()
        self._blocks: OrderedDict[str, Future[np.ndarray]] = OrderedDict()  # most recently used

    def read(self, fqn: str, box: Box) -> np.ndarray[Any, Any]:
        parameter, distribution = self._parameters[fqn], self._distributions[fqn]
        return initial_values(parameter, distribution, seed=self._seed, box=box, draw=self._cached)

    def blocks(self, fqn: str, box: Box) -> Iterator[tuple[Box, Callable[[], np.ndarray]]]:
        """The values of a box in parts (see initial_blocks), so that a large box needs the memory of a few blocks."""
        return initial_blocks(self._parameters[fqn], self._distributions[fqn], seed=self._seed, box=box)

    def _cached(self, distribution: Distribution, shape: Sequence[int], key: str) -> np.ndarray:
        """Draw a block, or wait for the thread that is drawing it."""
        with self._lock:
            is_new = key not in self._blocks
            block = self._blocks.setdefault(key, Future())
            self._blocks.move_to_end(key)
            if len(self._blocks) > _NUM_CACHED:
                self._blocks.popitem(last=False)
        if is_new:
            try:
                block.set_result(_draw(distribution, shape, key))
            except BaseException as error:  # waiting threads raise it too
                block.set_exception(error)
        return block.result()
