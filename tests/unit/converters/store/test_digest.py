"""Digests: the same for any cut, order and naming; another one for any other value, place, dtype or shape."""

import random

import numpy as np
import pytest
from xxhash import xxh3_128_intdigest

from converters.common.box import Box
from converters.store.digest import TensorDigest
from tests.unit.converters.views.test_cover import split


def digest(array: np.ndarray, boxes: list[Box] | None = None) -> str:
    total = TensorDigest(array.dtype.name, array.shape)
    for box in boxes or [Box.whole(array.shape)]:
        part = TensorDigest(array.dtype.name, array.shape)
        part.update(box, array[box.slices_within(Box.whole(array.shape))])
        total.add_partial(part.partial)
    return total.hexdigest()


@pytest.mark.parametrize("shape", [(16,), (9, 8), (4, 3, 5), (2, 2, 2, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_any_cut_into_whole_rows_gives_the_same(shape, seed):
    generator = random.Random(seed)
    array = np.random.default_rng(seed).normal(size=shape).astype("float32")
    row_dims = len(shape) - 1 or 1
    boxes = [
        Box(cut.offsets + (0,) * (len(shape) - row_dims), cut.sizes + shape[row_dims:])
        for cut in split(generator, Box.whole(shape[:row_dims]), 3)
    ]
    generator.shuffle(boxes)
    assert len(boxes) > 1
    assert digest(array, boxes) == digest(array)


def test_long_rows_in_parts():
    array = np.random.default_rng(0).normal(size=(3, 100)).astype("float32")
    total = TensorDigest("float32", array.shape)
    for row in (2, 0, 1):
        for start in (0, 30, 60):
            stop = min(100, start + 40) if start == 60 else start + 30
            total.update(Box((row, start), (1, stop - start)), array[row : row + 1, start:stop])
    assert total.hexdigest() == digest(array)


def test_parts_of_rows_out_of_order_are_refused():
    total = TensorDigest("float32", (2, 4))
    with pytest.raises(ValueError, match="add whole rows"):
        total.update(Box((0, 2), (2, 2)), np.zeros((2, 2), "float32"))


def test_sums_travel_between_processes():
    array = np.arange(12, dtype="float32").reshape(4, 3)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = TensorDigest("float32", array.shape)
        part.update(Box((rows.start, 0), (rows.stop - rows.start, 3)), array[rows])
        parts.append(part.partial)
    total = TensorDigest("float32", array.shape)
    for value in parts:
        total.add_partial(value)
    assert total.hexdigest() == digest(array)


def test_rows_stored_in_another_order():
    array = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    order = [3, 0, 5, 1, 4, 2]
    total = TensorDigest("float32", array.shape)
    total.update(Box((0, 0), (2, 4)), array[order][:2], rows=order[:2])
    total.update(Box((2, 0), (4, 4)), array[order][2:], rows=order[2:])
    assert total.hexdigest() == digest(array)


def test_every_change_changes_it():
    array = np.arange(24, dtype="float32").reshape(6, 4)
    seen = {digest(array)}
    swapped = array[[1, 0, 2, 3, 4, 5]]
    columns = array[:, [1, 0, 2, 3]]
    others = [swapped, columns, array.reshape(4, 6), array.view("int32"), array.reshape(24)]
    for flipped in range(0, array.nbytes, 7):
        raw = bytearray(array.tobytes())
        raw[flipped] ^= 1
        others.append(np.frombuffer(bytes(raw), "float32").reshape(6, 4))
    for other in others:
        seen.add(digest(other))
    assert len(seen) == 1 + len(others)
    zeros = [
        np.zeros((2, 2), "float32"),
        np.zeros((4, 1), "float32"),
        np.zeros((2, 2), "int32"),
        np.zeros(0, "float32"),
    ]
    assert len({digest(array) for array in zeros}) == 4


def test_scalars():
    assert digest(np.array(1.0)) != digest(np.array(2.0))


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("shape", [(300,), (200, 1), (70, 2, 2), (5, 40, 1)])
def test_many_short_rows_have_the_digest_of_their_definition(dtype, shape):
    array = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    rows = array.reshape(-1, 1) if array.ndim == 1 else array.reshape(-1, shape[-1])
    total = xxh3_128_intdigest(f"{dtype} {list(shape)}".encode())
    total += sum(xxh3_128_intdigest(row.tobytes(), number) for number, row in enumerate(rows))
    assert digest(array) == f"{total % 2**128:032x}"
