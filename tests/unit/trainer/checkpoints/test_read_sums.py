"""CRC32s of parts of files become those of the files, however the parts overlap and whatever is missing."""

import random
import zlib

import pytest
import torch
import torch.distributed as dist

from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.engine.read import CatalogReader
from converters.families.llama3 import FLAVORS
from converters.model.model_info import ModelInfo
from converters.source.open import open_checkpoint
from converters.store.folder import FolderStore
from converters.store.manifest import read_manifest
from converters.views.catalog import Catalog, Chunk, TensorEntry
from trainer.checkpoints import read_sums, write
from trainer.checkpoints.read_sums import ReadSums, _cover, _File, _join
from trainer.checkpoints.write import write_step


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('pg')}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def step(tmp_path, group):
    torch.manual_seed(0)
    state = {"a": torch.randn(300, 50), "b": torch.randn(7), "c": torch.randn(40, 900), "s": torch.tensor(3.0)}
    write_step(tmp_path / "step-1", state, info=ModelInfo("llama3", FLAVORS["debug_gqa"]), group=group)
    return tmp_path / "step-1"


def read_some(reader, draw, *, share=1.0):
    """Read tensors in pieces of rows, some of them not, some of them twice."""
    for fqn, info in reader.tensors.items():
        row = 0
        while row < (info.shape or (1,))[0]:
            num = min(draw.randint(1, 200), (info.shape or (1,))[0] - row)
            box = Box((row, *[0] * (len(info.shape) - 1)), (num, *info.shape[1:])) if info.shape else Box((), ())
            for _ in range(draw.choice([1, 1, 2]) if draw.random() < share else 0):
                reader.read(fqn, box)
            row += num


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_read_every_changed_byte_is_found(step, group, monkeypatch, seed):
    draw, files = random.Random(seed), read_manifest(step).files
    monkeypatch.setattr(read_sums, "_PART_BYTES", 5000)
    num_read = []
    whole = read_sums.sum_range
    monkeypatch.setattr(
        read_sums,
        "sum_range",
        lambda store, name, start, num: (num_read.append(num), whole(store, name, start, num))[1],
    )

    def problems(share):
        with CatalogReader(open_checkpoint(step)) as reader:
            sums = ReadSums(reader)
            read_some(reader, draw, share=share)
            num_read.clear()
            return sums.problems(files, group)

    small = sum(f.size for name, f in files.items() if not name.endswith(".distcp"))
    assert problems(1.0) == [] and sum(num_read) == small  # of the data, nothing is read again
    assert problems(0.5) == [] and sum(num_read) > small
    for name in files:
        data = bytearray((step / name).read_bytes())
        for _ in range(4):
            at = draw.randrange(len(data))
            if name != ".metadata":  # which was read, and checked, before
                data[at] ^= 8
                (step / name).write_bytes(data)
                try:
                    found = problems(draw.choice([0.0, 0.5, 1.0]))
                except CheckpointError:  # what is around the values can no longer be read: see load.py
                    continue
                finally:
                    data[at] ^= 8
                assert found == [f"{name}: its bytes have changed (CRC32)"], at
        (step / name).write_bytes(data)


def test_bytes_that_change_between_two_reads_are_a_problem(step, group):
    files = read_manifest(step).files
    with CatalogReader(open_checkpoint(step)) as reader:
        sums = ReadSums(reader)
        sums._add("__0_0.distcp", 0, memoryview(b"some"))
        sums._add("__0_0.distcp", 0, memoryview(b"same"))
        found = sums.problems(files, group)
    assert "__0_0.distcp: two reads of it gave different bytes" in found


def test_parts_of_several_ranks_cover_a_file(tmp_path):
    """Equal parts, nested ones, such that overlap: what is left out is read by somebody."""
    data = random.Random(0).randbytes(10_000)
    (tmp_path / "file").write_bytes(data)
    for seed in range(50):
        draw, rows = random.Random(seed), []
        for _rank in range(3):
            known = _File(begins=set(range(0, 10_000, 1000)))
            for start in range(0, 10_000, 500):
                if draw.random() < 0.6:
                    start, length = start + draw.choice([0, 0, 100]), draw.choice([500, 500, 400, 900])
                    known.ranges[start, min(length, 10_000 - start)] = zlib.crc32(data[start : start + length])
            rows += [[s.start, s.start - s.end, s.crc32] for s in _join(FolderStore(tmp_path), "file", known, 10_000)]
        end = 0
        for part in _cover(10_000, sorted(rows)):
            assert part.start == end
            end += part.length
            assert part.crc32 in (None, zlib.crc32(data[part.start : end]))
        assert end == 10_000
    assert [*_cover(5, [])] == [(0, 5, None), (5, 0, 0)]


def test_rows_are_added_once_however_unevenly_they_are_cut():
    def chunk(rows, columns, file):
        box = Box((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
        return Chunk(box, file, 0, (1, 1))

    even = [chunk(r, c, f) for r, c, f in (((0, 4), (0, 3), "a"), ((0, 4), (3, 6), "b"), ((4, 8), (0, 6), "c"))]
    uneven = [*even[:1], chunk((0, 2), (3, 6), "b"), chunk((2, 4), (3, 6), "c"), even[2]]
    catalog = Catalog(
        None, "dcp", {n: TensorEntry(n, "float32", (8, 6), tuple(c)) for n, c in (("e", even), ("u", uneven))}
    )
    nodes = [("x", ["a", "b"]), ("y", ["c"]), ("x", [])]
    work, whole = write._rows_to_read(catalog, nodes)
    assert whole == {"u"}
    assert work == [[("e", Box((0, 0), (4, 6)))], [], [("u", Box((0, 0), (8, 6)))]]
