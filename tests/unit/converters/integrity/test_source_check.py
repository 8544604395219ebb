"""integrity/source_check.py: what was damaged since its manifest was written is found on the way, and not copied."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from converters.common.errors import CheckpointError
from converters.engine.read import CatalogReader
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info, write_model_info
from converters.source.open import open_checkpoint
from converters.store.folder_output import FolderOutput
from converters.store.manifest import TensorSum, read_manifest
from converters.store.output import write_manifest
from converters.verify import verify
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama

WAYS = {
    "convert to DCP": lambda src, dst: convert(src, dst, to="dcp"),
    "convert to HF": lambda src, dst: convert(src, dst, to="hf", source="dcp"),
    "convert with a cast": lambda src, dst: convert(src, dst, to="hf", dtype="bfloat16"),
    "convert to Meta": lambda src, dst: convert(src, dst, to="meta"),
    "reshard": lambda src, dst: reshard(src, dst, mesh=MeshShape(dp_shard=3)),
    "reshard with a cast": lambda src, dst: reshard(src, dst, dtype="bfloat16"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """hf/ as transformers writes it, dcp/ and ours/ (safetensors) as titan does."""
    folder = tmp_path_factory.mktemp("sound")
    write_llama(folder / "hf", vocab_size=302, rope_scaling=None)  # even, so that two shards are of one size
    convert(folder / "hf", folder / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2)))
    convert(folder / "dcp", folder / "ours", to="hf", options=OutputOptions(shard_bytes=30_000))
    return folder


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def place_of(file, catalog_root, fqn):
    """A byte in the middle of the values that `file` holds of a tensor."""
    catalog = open_checkpoint(catalog_root)
    with CatalogReader(catalog) as reader:
        chunks = [reader.located(fqn, c) for c in catalog.tensors[fqn].chunks]
    return next(c.byte_offset for c in chunks if c.file == file.name) + 13


def is_refused(way, src, dst, *names):
    with pytest.raises(CheckpointError, match="changed or damaged since titan wrote it") as error:
        WAYS[way](src, dst)
    assert all(f"\n  {name}" in error.value.message for name in names), error.value.message
    assert f"titan verify {src}" in error.value.tries[0]
    assert [p.name for p in dst.parent.iterdir()] == [src.name]


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_not_copied(sound, way, tmp_path):
    WAYS[way](sound / "dcp", tmp_path / "good")
    assert verify(tmp_path / "good").ok
    shutil.rmtree(tmp_path / "good")
    shutil.copytree(sound / "dcp", tmp_path / "bad")
    file = tmp_path / "bad" / "__1_0.distcp"
    for fqn in ("layers.1.attention.wk.weight", "norm.weight"):
        flip(file, place_of(file, tmp_path / "bad", fqn))
    is_refused(way, tmp_path / "bad", tmp_path / "out", "layers.1.attention.wk.weight", "norm.weight")


@pytest.mark.parametrize("way", ["convert to HF", "reshard"])
def test_a_flipped_bit_is_not_copied_where_there_are_no_digests(sound, way, tmp_path):
    """The CRC32s of the files stand in for them."""
    convert(sound / "hf", tmp_path / "bad", to="dcp", digests=False)
    WAYS[way](tmp_path / "bad", tmp_path / "good")
    shutil.rmtree(tmp_path / "good")
    file = tmp_path / "bad" / "__0_0.distcp"
    flip(file, place_of(file, tmp_path / "bad", "norm.weight"))
    with pytest.raises(CheckpointError, match=r"(?s)changed or damaged since titan wrote it.*__0_0.distcp"):
        WAYS[way](tmp_path / "bad", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize("way", ["convert to DCP", "convert with a cast"])
def test_a_flipped_bit_in_safetensors_is_not_copied(sound, way, tmp_path):
    """q and k lie permuted there; the digest does not depend on it."""
    shutil.copytree(sound / "ours", tmp_path / "bad")
    name = "model.layers.0.self_attn.q_proj.weight"
    file = tmp_path / "bad" / open_checkpoint(tmp_path / "bad").tensors[name].chunks[0].file
    flip(file, place_of(file, tmp_path / "bad", name))
    is_refused(way, tmp_path / "bad", tmp_path / "out", name)


def test_swapped_shards_are_not_copied(sound, tmp_path):
    """Two files of equal size and structure: nothing but the values can tell."""
    shutil.copytree(sound / "dcp", tmp_path / "bad")
    one, other = tmp_path / "bad" / "__0_0.distcp", tmp_path / "bad" / "__1_0.distcp"
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    other.write_bytes(first)
    is_refused("reshard", tmp_path / "bad", tmp_path / "out", "layers.0.attention.wq.weight")


def test_a_cast_that_damage_makes_overflow_is_called_damage(sound, tmp_path):
    shutil.copytree(sound / "dcp", tmp_path / "bad")
    file = tmp_path / "bad" / "__0_0.distcp"
    place = place_of(file, tmp_path / "bad", "norm.weight") + 2  # the byte that holds sign and exponent
    data = bytearray(file.read_bytes())
    data[place] = 0x7E
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="its values are not those that titan_manifest.json lists"):
        convert(tmp_path / "bad", tmp_path / "out", to="hf", dtype="float16")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("assets/tokenizer.json", b"1.0", b"1.1"), ("titan_model.json", b"10000.0", b"20000.0")],
)
def test_small_files_that_changed_are_not_copied(sound, name, old, new, tmp_path):
    shutil.copytree(sound / "dcp", tmp_path / "bad")
    file = tmp_path / "bad" / name
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new))
    for way in ("convert to HF", "reshard"):
        with pytest.raises(CheckpointError, match=f"changed or damaged since titan wrote it:\n  {name}: its bytes"):
            WAYS[way](tmp_path / "bad", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def training(sound, folder, *, manifest):
    """A training checkpoint by stock torch, with or without a manifest of digests next to it."""
    src = open_checkpoint(sound / "dcp")
    state = {name: torch.zeros(entry.shape) for name, entry in src.tensors.items()}
    dcp.load(state, checkpoint_id=str(sound / "dcp"), no_dist=True)
    moments = {f"optimizer.state.{name}.exp_avg": torch.randn(value.shape) for name, value in state.items()}
    dcp.save(state | moments | {"train_state": {"note": "x" * 50}}, checkpoint_id=str(folder), no_dist=True)
    write_model_info(folder, read_model_info(sound / "hf"))
    if manifest:
        catalog = open_checkpoint(folder)
        reshard(folder, folder.with_name("once"))
        sums = read_manifest(folder.with_name("once")).tensors
        write_manifest(
            FolderOutput(folder),
            tensors={n: TensorSum(e.dtype, e.shape, sums[n].digest) for n, e in catalog.tensors.items()},
        )
        shutil.rmtree(folder.with_name("once"))
    return folder


def test_moments_are_checked_where_they_are_copied(sound, tmp_path):
    bad = training(sound, tmp_path / "bad", manifest=True)
    file = bad / "__0_0.distcp"
    flip(file, place_of(file, bad, "optimizer.state.norm.weight.exp_avg"))
    is_refused("reshard", bad, tmp_path / "out", "optimizer.state.norm.weight.exp_avg")
    reshard(bad, tmp_path / "weights", drop=["optimizer"])
    convert(bad, tmp_path / "hf", to="hf")


@pytest.mark.parametrize("manifest", [True, False])
def test_a_damaged_value_that_is_no_tensor_is_not_copied(sound, manifest, tmp_path):
    bad = training(sound, tmp_path / "bad", manifest=manifest)
    file = bad / "__0_0.distcp"
    flip(file, file.read_bytes().index(b"x" * 50))
    with pytest.raises(CheckpointError, match=r"entries are damaged:\n  train_state.note"):
        reshard(bad, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_a_source_that_nothing_vouches_for_is_reported(sound, tmp_path):
    stock = training(sound, tmp_path / "stock", manifest=False)
    for report in (reshard(stock, tmp_path / "a"), convert(stock, tmp_path / "b", to="hf")):
        assert any("no titan_manifest.json" in remark for remark in report.remarks)
    assert reshard(sound / "dcp", tmp_path / "c").remarks == ()
    assert convert(sound / "hf", tmp_path / "d", to="dcp").remarks == ()  # which carries nothing to check


def test_a_weights_file_next_to_a_checkpoint_is_not_its_own(sound, tmp_path):
    shutil.copytree(sound / "ours", tmp_path / "ours")
    tensors = load_file(sound / "hf" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, tmp_path / "ours" / "other.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "ours" / "other.safetensors", tmp_path / "out", to="dcp", model_from=sound / "hf")
    assert verify(tmp_path / "out").ok
