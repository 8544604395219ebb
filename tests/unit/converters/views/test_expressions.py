"""converters/views/expressions.py: every node reads any box as numpy would index it, and undoes its inverse."""

import ml_dtypes
import numpy as np
import pytest

from converters.common.box import Box
from converters.store.digest import TensorDigest, digest_of_sum, sum_of_rows
from converters.views.expressions import (
    AllZeros,
    HeadRows,
    Index,
    Join,
    Source,
    Stack,
    Take,
    Transpose,
)
from tests.unit.converters.samples import Arrays

RNG = np.random.default_rng(0)
STACKED = RNG.standard_normal((12, 6, 5), dtype=np.float32)


PARTS = Arrays(**{f"e{n}": STACKED[n] for n in range(12)})
WHOLE = Arrays(w=STACKED, up=STACKED + 100)
CASES = {
    "stack": (Stack(tuple(Source(f"e{n}") for n in range(12))), PARTS, STACKED),
    "index": (Index(Source("w"), 10, 6), WHOLE, STACKED[10]),
    "index of a stack": (Index(Stack(tuple(Source(f"e{n}") for n in range(12))), 7, 6), PARTS, STACKED[7]),
    "second half": (Take(Source("w"), 1, 3), WHOLE, STACKED[:, 3:]),
    "join": (Join((Source("w"), Source("up")), 1, (12, 12, 5)), WHOLE, np.concatenate([STACKED, STACKED + 100], 1)),
    "join of rows": (Join((Source("w"), Source("up")), 0, (24, 6, 5)), WHOLE, np.concatenate([STACKED, STACKED + 100])),
    "heads": (
        HeadRows(HeadRows(Source("e0"), 2, to_halves=True), 6, to_halves=False),
        PARTS,
        STACKED[0][[0, 3, 1, 4, 2, 5]],
    ),
    "transposed": (Transpose(Source("w")), WHOLE, STACKED.swapaxes(1, 2)),
    "transposed matrix": (Transpose(Source("e0")), PARTS, STACKED[0].T),
    "transposed twice": (Transpose(Transpose(Source("w"))), WHOLE, STACKED),
    "transposed half": (Transpose(Take(Source("w"), 2, 2)), WHOLE, STACKED[:, :, 2:].swapaxes(1, 2)),
    "join of transposed": (
        Join((Transpose(Source("w")), Transpose(Source("up"))), 2, (12, 5, 12)),
        WHOLE,
        np.concatenate([STACKED, STACKED + 100], 1).swapaxes(1, 2),
    ),
    "zeros": (AllZeros("float32"), PARTS, np.zeros((12, 6), np.float32)),
}


@pytest.mark.parametrize("case", CASES)
def test_any_box(case):
    expression, source, expected = CASES[case]
    for _ in range(60):
        starts = [int(RNG.integers(0, size)) for size in expected.shape]
        sizes = [int(RNG.integers(0, size - start + 1)) for size, start in zip(expected.shape, starts, strict=True)]
        box = Box(tuple(starts), tuple(sizes))
        found = expression.read(source, box)
        assert found.shape == box.sizes
        assert np.array_equal(found, expected[box.slices_within(Box.whole(expected.shape))])


def test_a_box_reads_only_its_own_experts():
    read = []

    class Watched(Arrays):
        def read(self, fqn, box):
            read.append((fqn, box))
            return super().read(fqn, box)

    CASES["stack"][0].read(Watched(**PARTS.arrays), Box((9, 2, 0), (2, 1, 5)))
    assert read == [("e9", Box((2, 0), (1, 5))), ("e10", Box((2, 0), (1, 5)))]


def test_the_same_over_other_tensors():
    other = Arrays(**{f"e{n}.exp_avg": 2 * STACKED[n] for n in range(12)})
    moments = CASES["stack"][0].renamed(lambda name: f"{name}.exp_avg")
    assert moments.sources == tuple(f"e{n}.exp_avg" for n in range(12))
    assert np.array_equal(moments.read(other, Box.whole(STACKED.shape)), 2 * STACKED)


def digest_of(array, rows=lambda numbers: numbers) -> TensorDigest:
    digest = TensorDigest(str(array.dtype), array.shape)
    for start in range(0, len(array), 3):  # in boxes, as they are read
        box = Box((start,) + (0,) * (array.ndim - 1), (min(3, len(array) - start), *array.shape[1:]))
        digest.update(box, array[start : start + 3], rows=rows(digest.row_numbers(box)))
    return digest


def test_digests_of_parts_add_up_to_that_of_the_stack():
    whole = digest_of(STACKED)
    parts = [digest_of(STACKED[n], lambda rows, n=n: Index(Source("w"), n, 6).source_rows(rows)) for n in range(12)]
    total = sum(sum_of_rows(part.hexdigest(), "float32", (6, 5)) for part in parts)
    assert digest_of_sum(total, "float32", STACKED.shape) == whole.hexdigest()
    swapped = [
        digest_of(STACKED[n ^ 1], lambda rows, n=n: Index(Source("w"), n, 6).source_rows(rows)) for n in range(12)
    ]
    assert digest_of_sum(sum(part.partial for part in swapped), "float32", STACKED.shape) != whole.hexdigest()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_fused_tensor_has_a_digest_of_its_own_which_sees_exchanged_halves(dim):
    halves, join = (STACKED, STACKED + 100), Join((Source("w"), Source("up")), dim, (0, 0, 0))
    fused, swapped = (
        digest_of(np.concatenate(parts, dim), lambda rows: join.source_rows(rows)) for parts in (halves, halves[::-1])
    )
    assert fused.hexdigest() == digest_of(np.concatenate(halves, dim)).hexdigest() != swapped.hexdigest()


def test_what_has_rows_of_its_own():
    take, turned = Take(Source("fused"), 1, 3), Transpose(Source("w"))
    found = [
        e.has_own_digest
        for e in (take, turned, Stack((Source("a"), take)), Index(take, 0, 3), Join((Source("a"),), 0, (1,)))
    ]
    assert all(found)
    assert not any(
        e.has_own_digest for e in (Source("a"), CASES["stack"][0], Index(Source("a"), 0, 3), AllZeros("float32"))
    )


def test_large_stacks_are_transposed_in_strips_and_read_once():
    read = np.zeros((2, 1500, 1100), np.uint8)

    class Watched(Arrays):
        def read(self, fqn, box):
            read[box.slices_within(Box.whole(read.shape))] += 1
            assert box.num_elements <= 1 << 20
            return super().read(fqn, box)

    stack = RNG.integers(0, 1 << 16, read.shape, np.uint16).view(ml_dtypes.bfloat16)
    box = Box((0, 3, 1), (2, 1097, 1499))
    found = Transpose(Source("w")).read(Watched(w=stack), box)
    expected = stack.swapaxes(1, 2)[box.slices_within(Box.whole((2, 1100, 1500)))]
    assert found.dtype == stack.dtype and np.array_equal(found.view("u2"), np.ascontiguousarray(expected).view("u2"))
    assert (read[:, 1:, 3:] == 1).all() and read.sum() == box.num_elements


@pytest.mark.parametrize("shape", [(3, 0, 4), (3, 4, 0), (0, 3, 4)])
def test_empty_stacks_are_transposed(shape):
    expected = np.zeros(shape, np.float32).swapaxes(1, 2)
    found = Transpose(Source("w")).read(Arrays(w=np.zeros(shape, np.float32)), Box.whole(expected.shape))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
