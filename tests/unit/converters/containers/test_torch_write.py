"""A torch file that we write is what torch.load opens, mapped and with weights_only, and what zipfile calls sound."""

import zipfile
from zlib import crc32

import pytest
import torch

from converters.common.box import TensorInfo
from converters.common.crc import join_crc32
from converters.common.errors import CheckpointError
from converters.containers.torch_write import plan_torch
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from converters.store.folder_output import FolderFiles
from converters.store.manifest import check_files, sum_file
from tests.unit.converters.samples import infos, raw, read_all, state_dict, write


@pytest.fixture(scope="module", params=[False, True], ids=["", "streamed"])
def written(tmp_path_factory, request):
    """Tensors of every kind, and the file that we made of the one torch saved."""
    folder = tmp_path_factory.mktemp("torch")
    state = state_dict()
    torch.save(state, folder / "torch.pt")
    with CatalogReader(open_checkpoint(folder / "torch.pt")) as reader:
        target = plan_torch(infos(state), file="ours.pt", streamed=request.param)
        write(reader, target, folder / "ours", in_order=request.param)
    return state, folder / "ours" / "ours.pt"


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it(written, mmap):
    state, path = written
    loaded = torch.load(path, mmap=mmap, weights_only=True)
    assert list(loaded) == list(state)
    for fqn, tensor in state.items():
        assert (loaded[fqn].dtype, loaded[fqn].shape) == (tensor.dtype, tensor.shape)
        assert loaded[fqn].is_contiguous() and raw(loaded[fqn]) == raw(tensor)


def test_torch_saves_the_same_records(written, tmp_path):
    """Saved again by torch, every storage has the same number and the same bytes."""
    state, path = written
    again = tmp_path / "again.pt"
    torch.save(torch.load(path, weights_only=True), again)
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(again) as theirs:
        data = [name for name in ours.namelist() if "/data/" in name]
        stems = {name: name.replace("archive/", "again/") for name in data}
        assert len(data) == len(state)
        assert {name: ours.getinfo(name).CRC for name in data} == {
            name: theirs.getinfo(stems[name]).CRC for name in data
        }


def test_crcs_are_true_and_data_is_aligned(written):
    _, path = written
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    catalog = open_checkpoint(path)
    assert [entry.fqn for entry in catalog.tensors.values() if entry.chunks[0].byte_offset % 64] == []
    assert check_files(path.parent) == []


def test_we_read_it_too(written):
    state, path = written
    assert read_all(open_checkpoint(path)) == {fqn: raw(tensor) for fqn, tensor in state.items()}


def test_a_shared_storage_is_written_once(tmp_path):
    state = {"embedding": torch.randn(50, 8), "norm": torch.ones(8)}
    state["output"] = state["embedding"]
    torch.save(state, tmp_path / "torch.pt")
    target = plan_torch(infos(state), file="ours.pt", shared={"output": "embedding"})
    with CatalogReader(open_checkpoint(tmp_path / "torch.pt")) as reader:
        write(reader, target, tmp_path / "ours")
    loaded = torch.load(tmp_path / "ours" / "ours.pt", weights_only=True)
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[fqn], tensor) for fqn, tensor in state.items())
    assert loaded["output"].data_ptr() == loaded["embedding"].data_ptr()
    assert (tmp_path / "ours" / "ours.pt").stat().st_size < 50 * 8 * 4 + 8 * 4 + 3000
    assert read_all(open_checkpoint(tmp_path / "ours")) == {fqn: raw(tensor) for fqn, tensor in state.items()}


def test_beyond_4_gib(tmp_path):
    """A tensor of more than 4 GiB (a hole on the disk), and small ones that begin behind it."""
    huge = (1 << 32) + 7
    small = torch.arange(100, dtype=torch.int32)
    tensors = {"first": TensorInfo("int32", (100,)), "huge": TensorInfo("uint8", (huge,))}
    tensors |= {"behind": TensorInfo("int32", (100,)), "last": TensorInfo("int32", (100,))}
    target = plan_torch(tensors, file="x.pt")
    zeros = crc32(bytes(7))
    block = crc32(bytes(1 << 20))
    for _ in range(1 << 12):
        zeros = join_crc32(zeros, block, 1 << 20)
    crcs = [zeros if slot.fqn == "huge" else crc32(raw(small)) for slot in target.slots]
    with (tmp_path / "x.pt").open("wb") as file:
        for slot in target.slots:
            if slot.fqn != "huge":
                file.seek(slot.byte_offset)
                file.write(raw(small))
    sums = target.finish(FolderFiles(tmp_path), crcs)
    assert sums["x.pt"].size == target.total_bytes == (tmp_path / "x.pt").stat().st_size
    loaded = torch.load(tmp_path / "x.pt", mmap=True, weights_only=True)
    assert loaded["huge"].shape == (huge,) and loaded["huge"][-1] == 0
    assert all(torch.equal(loaded[name], small) for name in ("first", "behind", "last"))
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.getinfo("archive/data/3").header_offset > 1 << 32
        assert archive.read("archive/data/3") == raw(small)
    with CatalogReader(open_checkpoint(tmp_path / "x.pt")) as reader:
        assert reader.record_problems("last") == reader.record_problems("first") == []


def test_the_file_s_own_crc_is_joined_from_its_parts(tmp_path):
    state = {"a": torch.randn(7, 3), "empty": torch.zeros(0, 4), "b": torch.randn(5)}
    torch.save(state, tmp_path / "torch.pt")
    with CatalogReader(open_checkpoint(tmp_path / "torch.pt")) as reader:
        target = plan_torch(infos(state), file="ours.pt")
        result = write(reader, target, tmp_path / "ours")
    again = tmp_path / "again"
    again.mkdir()
    (again / "ours.pt").write_bytes((tmp_path / "ours" / "ours.pt").read_bytes())
    assert target.finish(FolderFiles(again), result.crc32) == {"ours.pt": sum_file(tmp_path / "ours" / "ours.pt")}


def test_an_unknown_element_type_is_refused():
    with pytest.raises(CheckpointError, match="'float4'"):
        plan_torch({"a": TensorInfo("float4", (2,))}, file="x.pt")
