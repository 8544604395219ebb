"""Exact cover: found where it holds, and every hole, overlap and stray chunk is reported."""

import random

import numpy as np
import pytest

from converters.common.box import Box
from converters.views.catalog import Chunk, TensorEntry
from converters.views.cover import BoxIndex, cover_problem


def entry(shape, boxes) -> TensorEntry:
    return TensorEntry("w", "float32", shape, tuple(Chunk(Box(*box), "f", 0, ()) for box in boxes))


def split(generator: random.Random, box: Box, depth: int) -> list[Box]:
    """A random guillotine cut of a box."""
    dims = [d for d, n in enumerate(box.sizes) if n > 1]
    if not depth or not dims:
        return [box]
    dim = generator.choice(dims)
    at = generator.randrange(1, box.sizes[dim])
    parts = []
    for start, size in ((0, at), (at, box.sizes[dim] - at)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, size
        parts += split(generator, Box(tuple(offsets), tuple(sizes)), depth - 1)
    return parts


@pytest.mark.parametrize("seed", range(30))
def test_random_cuts_and_their_mutations(seed):
    generator = random.Random(seed)
    shape = tuple(generator.randrange(2, 9) for _ in range(generator.randrange(1, 4)))
    boxes = split(generator, Box.whole(shape), 4)
    generator.shuffle(boxes)
    pairs = [(box.offsets, box.sizes) for box in boxes]
    assert cover_problem(entry(shape, pairs)) is None
    assert "cover" in cover_problem(entry(shape, pairs[1:]))
    assert "overlap" in cover_problem(entry(shape, [*pairs, pairs[0]]))
    moved = [(tuple(o + 1 for o in pairs[0][0]), pairs[0][1]), *pairs[1:]]
    assert cover_problem(entry(shape, moved)) is not None

    index = BoxIndex(boxes)
    wanted = Box(tuple(generator.randrange(n) for n in shape), (1,) * len(shape))
    touched = [n for n in index.touching(wanted) if boxes[n].intersect(wanted)]
    assert touched == [n for n, box in enumerate(boxes) if box.intersect(wanted)] and len(touched) == 1


def test_scalars_and_empty_tensors():
    assert cover_problem(entry((), [((), ())])) is None
    assert cover_problem(entry((), [])) == "chunks cover 0 of 1 elements"
    assert cover_problem(entry((), [((), ()), ((), ())])) == "chunks overlap"
    assert cover_problem(entry((0, 4), [((0, 0), (0, 4))])) is None
    assert cover_problem(entry((0, 4), [])) is None
    assert "dims" in cover_problem(entry((4,), [((0, 0), (4, 1))]))


def test_a_grid_of_many_chunks_is_fast():
    boxes = [((r * 4, c * 4), (4, 4)) for r, c in np.ndindex(512, 16)]
    assert cover_problem(entry((2048, 64), boxes)) is None
    assert "overlap" in cover_problem(entry((2048, 64), [*boxes[:-1], boxes[0]]))
