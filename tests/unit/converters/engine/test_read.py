"""Reading boxes: any box of any layout equals the same slice of the whole tensor, in bounded memory."""

import gc
import os
import random
import tracemalloc
from math import prod
from pathlib import Path

import numpy as np
import pytest

import converters.engine.read as read
from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.engine.read import CatalogReader
from converters.store.folder import FolderStore
from converters.views.catalog import Catalog, Chunk, TensorEntry
from tests.unit.converters.views.test_cover import split


def lay_out(folder: Path, array: np.ndarray, boxes: list[Box], generator: random.Random) -> Catalog:
    """Write chunks in random dim orders, with random gaps between their rows, into files of their own."""
    chunks = []
    for number, box in enumerate(boxes):
        order = list(range(array.ndim))
        generator.shuffle(order)
        part = array[box.slices_within(Box.whole(array.shape))].transpose(order)
        padded = np.full([n + generator.randrange(3) for n in part.shape], 99, dtype=array.dtype)
        padded[tuple(slice(0, n) for n in part.shape)] = part
        steps = [prod(padded.shape[d + 1 :]) for d in range(array.ndim)]
        strides = tuple(steps[order.index(d)] for d in range(array.ndim))
        lead = generator.randrange(5)
        (folder / f"{number}.bin").write_bytes(b"\xee" * lead + padded.tobytes())
        chunks.append(Chunk(box, f"{number}.bin", lead, strides))
    return Catalog(FolderStore(folder), "dcp", {"w": TensorEntry("w", array.dtype.name, array.shape, tuple(chunks))})


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("block_bytes", [8 << 20, 64])
def test_any_box_of_any_layout(tmp_path, monkeypatch, seed, block_bytes):
    monkeypatch.setattr(read, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(read, "_LONG_RUN_BYTES", 40)
    generator = random.Random(seed)
    shape = tuple(generator.randrange(1, 12) for _ in range(generator.randrange(0, 5)))
    dtype = generator.choice(["float32", "uint8", "int64", "complex128"])
    array = np.arange(prod(shape)).reshape(shape).astype(dtype)
    catalog = lay_out(tmp_path, array, split(generator, Box.whole(shape), 3), generator)
    with CatalogReader(catalog) as reader:
        for _ in range(10):
            offsets = tuple(generator.randrange(n) for n in shape)
            box = Box(offsets, tuple(generator.randrange(1, n - o + 1) for o, n in zip(offsets, shape, strict=True)))
            found = reader.read("w", box)
            assert found.dtype == array.dtype
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, array[box.slices_within(Box.whole(shape))])


def test_a_box_that_no_chunk_covers_is_an_error(tmp_path):
    array = np.zeros((4, 4), dtype="float32")
    catalog = lay_out(tmp_path, array, [Box((0, 0), (2, 4))], random.Random(0))
    with (
        CatalogReader(catalog) as reader,
        pytest.raises(CheckpointError, match=r"cover 4 of 8 elements, \[2, 4\] at \[1, 0\]"),
    ):
        reader.read("w", Box((1, 0), (2, 4)))


def test_a_file_that_shrinks_or_changes_is_noticed(tmp_path):
    array = np.zeros((4, 4), dtype="float32")
    catalog = lay_out(tmp_path, array, [Box.whole(array.shape)], random.Random(0))
    with pytest.raises(CheckpointError, match="changed while it was being read"), CatalogReader(catalog) as reader:
        reader.read("w", Box.whole(array.shape))
        with (tmp_path / "0.bin").open("ab") as file:
            file.write(b"more")
    os.truncate(tmp_path / "0.bin", 20)
    with CatalogReader(catalog) as reader, pytest.raises(CheckpointError, match="the file ends at byte"):
        reader.read("w", Box.whole(array.shape))


def test_more_files_than_descriptors(tmp_path):
    array = np.arange(400, dtype="float32").reshape(400, 1)
    boxes = [Box((row, 0), (1, 1)) for row in range(400)]
    catalog = lay_out(tmp_path, array, boxes, random.Random(0))
    gc.collect()  # what tests before this one have left must not be closed within it
    before = len(os.listdir("/proc/self/fd"))
    with CatalogReader(catalog) as reader:
        np.testing.assert_array_equal(reader.read("w", Box.whole(array.shape)), array)
        assert len(os.listdir("/proc/self/fd")) <= before + 65
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("columns", [slice(0, 64), slice(0, 8192)])
def test_memory_is_the_box_and_a_bounded_buffer(tmp_path, columns):
    shape = (8192, 8192)  # 64 MiB of bytes, sparse
    with (tmp_path / "f").open("wb") as file:
        file.truncate(prod(shape))
    chunk = Chunk(Box.whole(shape), "f", 0, (1, shape[0]))  # stored transposed
    catalog = Catalog(FolderStore(tmp_path), "torch", {"w": TensorEntry("w", "uint8", shape, (chunk,))})
    box = Box((0, columns.start), (1024 if columns.stop > 64 else 8192, columns.stop - columns.start))
    tracemalloc.start()
    with CatalogReader(catalog) as reader:
        reader.read("w", box)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < prod(box.sizes) + 2.5 * read.BLOCK_BYTES
