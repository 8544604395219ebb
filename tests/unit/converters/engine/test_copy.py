"""Copying: casts, non-finite values, long rows, progress, and errors before or during the copy."""

import errno
import gc
import os
import signal
import threading
import tracemalloc
from concurrent.futures import Future

import ml_dtypes
import numpy as np
import pytest
import torch

import converters.engine.units as units
from converters.common.box import Box, TensorInfo
from converters.common.errors import CheckpointError, UnsupportedError
from converters.containers.dcp_write import plan_dcp
from converters.containers.safetensors_write import plan_safetensors
from converters.engine.copy import Processing, copy_tensors
from converters.engine.units import MOST_BYTES, whole_row_units
from converters.source.open import open_checkpoint
from converters.store.digest import TensorDigest
from converters.store.folder_output import FolderOutput
from converters.store.manifest import check_files
from converters.views.casts import cast, count_non_finite
from converters.views.expressions import HeadRows, Source
from converters.views.view import Ledger, View
from tests.unit.converters.samples import AppendOnly, Arrays, raw, read_all, write


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64"])
def test_casts_round_as_torch_does(tmp_path, to):
    values = np.random.default_rng(0).normal(size=(300, 7)).astype("float32")
    target = plan_safetensors({"w": TensorInfo(to, values.shape)})
    write(Arrays(w=values), target, tmp_path / "out", casts={"w": to})
    assert read_all(open_checkpoint(tmp_path / "out"))["w"] == raw(torch.from_numpy(values).to(getattr(torch, to)))


@pytest.mark.parametrize(("to", "large"), [("float16", 1e6), ("bfloat16", 3.4e38), ("float8_e4m3fn", 1e3)])
def test_an_overflow_is_an_error_that_names_all_tensors(tmp_path, to, large):
    arrays = {name: np.ones((3, 3), "float32") for name in "abc"}
    arrays["a"][1, 1] = arrays["c"][0, 2] = arrays["c"][2, 2] = large
    target = plan_safetensors({name: TensorInfo(to, (3, 3)) for name in "abc"})
    with pytest.raises(CheckpointError, match=rf"(?s)a: 1 value does not fit {to}.*c: 2 values"):
        copy_tensors(Arrays(**arrays), target, FolderOutput(tmp_path), Processing(dict.fromkeys("abc", to)))


def test_infinities_that_were_there_are_counted_and_no_overflow(tmp_path):
    arrays = {"w": np.array([1, np.inf, -np.inf, np.nan], "float32"), "v": np.zeros(3, "float32")}
    target = plan_safetensors({"w": TensorInfo("bfloat16", (4,)), "v": TensorInfo("float32", (3,))})
    result = write(Arrays(**arrays), target, tmp_path / "out", casts={"w": "bfloat16"})
    assert result.non_finite == {"w": 3}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_is_judged_as_numpy_does(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    bits = np.random.default_rng(0).integers(0, 256, (4096, kind.itemsize), dtype="uint8").reshape(-1).view(kind)
    with np.errstate(invalid="ignore"):
        assert count_non_finite(bits, dtype) == np.count_nonzero(~np.isfinite(bits)) > 0


def test_what_does_not_match_is_reported_before_anything_is_written(tmp_path):
    source = Arrays(a=np.zeros((2, 3), "float32"), b=np.zeros(2, "float32"))
    target = plan_safetensors(
        {"a": TensorInfo("float32", (3, 2)), "b": TensorInfo("float16", (2,)), "c": TensorInfo("float32", (1,))}
    )
    with pytest.raises(CheckpointError, match=r"(?s)c: the source does not have it.*a: \[2, 3\].*b: float32"):
        copy_tensors(source, target, FolderOutput(tmp_path))
    with pytest.raises(UnsupportedError, match="n: int64 to float32"):
        only = plan_safetensors({"n": TensorInfo("float32", (2,))})
        copy_tensors(Arrays(n=np.zeros(2, "int64")), only, FolderOutput(tmp_path), Processing({"n": "float32"}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_order", [False, True], ids=["", "in order"])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("block_bytes", [8 << 20, 100])
def test_blocks_stay_small_and_nothing_depends_on_them(tmp_path, monkeypatch, workers, block_bytes, in_order):
    monkeypatch.setattr(units, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(units, "UNIT_BYTES", 3 * block_bytes)
    generator = np.random.default_rng(0)
    arrays = {
        "long_rows": generator.normal(size=(3, 70)).astype("float32"),
        "deep": generator.normal(size=(4, 5, 6)).astype("float32"),
        "vector": generator.normal(size=130).astype("float32"),
        "scalar": np.float32(2).reshape(()),
        "empty": np.zeros((0, 3), "float32"),
    }
    source = Arrays(**arrays)
    boxes = [
        ("long_rows", Box((0, 0), (3, 40))),
        ("long_rows", Box((0, 40), (2, 30))),
        ("long_rows", Box((2, 40), (1, 30))),
    ]
    boxes += [("deep", Box((0, 0, 0), (4, 2, 6))), ("deep", Box((0, 2, 0), (4, 3, 6)))]
    boxes += [(fqn, Box.whole(arrays[fqn].shape)) for fqn in ("vector", "scalar", "empty")]
    seen = []
    result = write(
        source,
        plan_dcp(source.tensors, {"__0_0.distcp": boxes[::2], "__1_0.distcp": boxes[1::2]}, streamed=in_order),
        tmp_path / "out",
        in_order=in_order,
        workers=workers,
        on_bytes=lambda count: seen.append((count, threading.current_thread())),
    )
    assert max(box.num_elements * source.arrays[fqn].itemsize for fqn, box in source.read_boxes) <= block_bytes
    assert [*result.read_twice] == (["long_rows"] if in_order else [])  # whose digest needs whole rows
    assert sum(count for count, _ in seen) == sum(a.nbytes for a in arrays.values())
    assert {thread for _, thread in seen} == {threading.main_thread()}
    assert read_all(open_checkpoint(tmp_path / "out")) == {fqn: a.tobytes() for fqn, a in arrays.items()}
    assert check_files(tmp_path / "out") == []
    for fqn, array in arrays.items():
        whole = TensorDigest("float32", array.shape)
        whole.update(Box.whole(array.shape), array)
        assert result.digests[fqn] == whole.hexdigest()


@pytest.mark.parametrize(("width", "rows"), [(700, 96), (5000, 32), (300_000, 4)])
def test_the_rows_of_a_head_are_read_together(tmp_path, width, rows):
    """A view gathers them from all over the head; in parts the head would be read several times."""

    class Reordered(View):
        def read(self, fqn: str, box: Box) -> np.ndarray:
            seen.append(box)
            return super().read(fqn, box)

    seen = []
    held = Arrays(w=np.zeros((rows * 8, width), "uint8"))
    source = Reordered(held, held.tensors, {"w": HeadRows(Source("w"), 32, to_halves=False)}, Ledger())
    copy_tensors(source, plan_safetensors(source.tensors), FolderOutput(tmp_path), workers=1)
    if width * 32 <= MOST_BYTES:
        assert all(box.offsets[0] % 32 == 0 and box.sizes[0] % 32 == 0 for box in seen)
    assert max(box.num_elements for box in seen) <= MOST_BYTES


@pytest.mark.parametrize(
    ("shape", "workers", "in_order"),
    [
        ((4096, 4096), 1, False),
        ((4096, 4096), 8, False),
        ((4096, 4096), 1, True),
        pytest.param((2, 1 << 23), 1, False, marks=pytest.mark.slow),
        ((2, 1 << 23), 8, False),
        ((2, 1 << 23), 2, True),
        pytest.param((1 << 16,), 1, False, marks=pytest.mark.slow),
    ],
)
def test_memory_is_a_few_blocks_for_each_worker(tmp_path, shape, workers, in_order):
    """Long rows and vectors too, with a cast and a check of what was read."""

    class Zeros(Arrays):
        def read(self, fqn: str, box: Box) -> np.ndarray:
            return np.zeros(box.sizes, "float32")

    source = Zeros()
    source.tensors = {"w": TensorInfo("float32", shape)}  # 64 MiB, or a vector: its hashes take long to trace
    target = plan_safetensors({"w": TensorInfo("bfloat16", shape)})
    tracemalloc.start()
    casts = {"w": "bfloat16"}
    output = AppendOnly(tmp_path) if in_order else FolderOutput(tmp_path)
    copy_tensors(source, target, output, Processing(casts, check_source=lambda found: None), workers=workers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    waiting = 8 * (2 * workers + 1) if in_order else 0  # units of 8 MiB whose turn has not come
    assert peak < (4 + 8 * workers + waiting) * 2**20


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (1, 50), (2, 3, 4), (2, 1, 9)])
@pytest.mark.parametrize("max_bytes", [1, 4, 20, 1000])
def test_units_of_whole_rows_cover_exactly(shape, max_bytes):
    seen = np.zeros(shape, int)
    for unit in whole_row_units(shape, 2, max_bytes):
        for box in unit:
            assert box.num_elements * 2 <= max(2, max_bytes)
            seen[box.slices_within(Box.whole(shape)) if shape else ...] += 1
    assert (seen == 1).all()


def test_an_error_of_the_source_ends_the_copy(tmp_path):
    class Broken(Arrays):
        def read(self, fqn: str, box: Box) -> np.ndarray:
            raise CheckpointError(f"{fqn} is broken")

    source = Broken(a=np.zeros(3, "float32"))
    with pytest.raises(CheckpointError, match="a is broken"):
        copy_tensors(source, plan_safetensors(source.tensors), FolderOutput(tmp_path), workers=3)


def test_no_thread_writes_on_after_an_interrupt(tmp_path):
    source = Arrays(**{f"t{n}": np.zeros((256, 1024), "float32") for n in range(20)})
    gc.collect()  # what tests before this one have left must not be closed within it
    threads, descriptors = {*threading.enumerate()}, len(os.listdir("/proc/self/fd"))

    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_tensors(source, plan_safetensors(source.tensors), FolderOutput(tmp_path), workers=4, on_bytes=interrupt)
    assert {*threading.enumerate()} <= threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_interrupt_while_a_lock_of_the_pool_is_held_is_delivered_later(tmp_path, monkeypatch):
    """Python runs signal handlers also within Condition.__enter__, after it has the lock and before `with` has it."""
    locked, result = threading.Event(), Future.result

    class Late(Arrays):
        def read(self, fqn, box):
            locked.wait(60)
            return super().read(fqn, box)

    def interrupted(future):
        future._condition.acquire()
        locked.set()
        signal.raise_signal(signal.SIGINT)
        future._condition.release()
        return result(future)

    source = Late(**{f"t{n}": np.zeros((64, 64), "float32") for n in range(20)})
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(Future, "result", interrupted)
            copy_tensors(source, plan_safetensors(source.tensors), FolderOutput(tmp_path), workers=2)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_thread_that_an_interrupt_leaves_behind_creates_no_file(tmp_path, monkeypatch):
    """Interrupted within Thread.start, the pool does not wait for the thread: it may write when the folder is gone."""
    removed, read = threading.Event(), threading.Event()

    class Late(Arrays):
        def read(self, fqn, box):
            removed.wait(60)
            read.set()
            return super().read(fqn, box)

    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        monkeypatch.undo()
        raise KeyboardInterrupt

    source = Late(a=np.zeros((64, 64), "float32"))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_tensors(source, plan_safetensors(source.tensors), FolderOutput(tmp_path), workers=2)
    (left_behind,) = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    for path in tmp_path.iterdir():
        path.unlink()
    removed.set()
    left_behind.join(60)
    assert read.is_set() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_in_plain_words(tmp_path, monkeypatch, number):
    def full(*arguments):
        raise OSError(number, os.strerror(number))

    source = Arrays(a=np.zeros(100_000, "float32"))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="no space left"):
        copy_tensors(source, plan_safetensors(source.tensors), FolderOutput(tmp_path))


@pytest.mark.parametrize("value", [1.001, 0.0, float("inf")])
def test_a_tensor_without_dims_is_cast(value):
    """As one with a single element."""
    alone, one = (cast(np.full(shape, value, np.float32), "bfloat16") for shape in ((), (1,)))
    assert alone.values.shape == () and alone.values.astype(np.float32) == one.values.astype(np.float32)[0]
    assert (alone.overflows, alone.relative_error) == (one.overflows, one.relative_error)
    assert (alone.relative_error > 0) == (value == 1.001)
