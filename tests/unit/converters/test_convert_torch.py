"""Torch files, written and read: torch.load opens ours, and the model is found in whatever a trainer nested it in."""

from fractions import Fraction

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from converters.common.errors import CheckpointError
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.unit.converters.samples import assert_same
from tests.uploaded import STORES, in_store


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, writes=["convert"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """hf/ as transformers wrote it, dcp/ converted from it."""
    root = tmp_path_factory.mktemp("torch")
    write_llama(root / "hf", vocab_size=302)
    convert(root / "hf", root / "dcp", to="dcp")
    return root


@pytest.fixture(scope="module")
def hf_state(folders):
    return load_file(folders / "hf" / "model.safetensors")


@pytest.fixture(scope="module")
def native_state(folders):
    names = dcp.FileSystemReader(str(folders / "dcp")).read_metadata().state_dict_metadata
    state = {name: torch.full(tuple(entry.size), torch.nan) for name, entry in names.items()}
    dcp.load(state, checkpoint_id=str(folders / "dcp"), no_dist=True)
    return state


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_dst_with_such_a_suffix_is_that_very_file(folders, native_state, suffix, mmap, tmp_path):
    dst = tmp_path / f"weights{suffix}"
    report = convert(folders / "dcp", dst, to="torch", source="dcp")
    assert [p.name for p in tmp_path.iterdir()] == [dst.name] and report.num_files == 1
    assert_same(torch.load(dst, weights_only=True, mmap=mmap), native_state)
    assert report.num_bytes == dst.stat().st_size
    assert any("--model-from" in remark for remark in report.remarks)
    assert verify(dst).ok


def test_a_folder_says_what_it_holds(folders, native_state, tmp_path):
    report = convert(folders / "dcp", tmp_path / "out", to="torch")
    assert_same(torch.load(tmp_path / "out" / "model.pt", weights_only=True), native_state)
    assert report.other_files[0] == "titan_model.json" and "assets/tokenizer.json" in report.other_files
    digests = {n: t.digest for n, t in read_manifest(tmp_path / "out").tensors.items()}
    assert digests == {n: t.digest for n, t in read_manifest(folders / "dcp").tensors.items()}
    convert(tmp_path / "out", tmp_path / "hf", to="hf", source="torch")  # nobody has to say what it is


def test_only_a_torch_file_is_replaced(folders, native_state, tmp_path):
    note, folder, old = tmp_path / "notes.pt", tmp_path / "folder.pt", tmp_path / "old.pt"
    note.write_text("precious")
    folder.mkdir()
    torch.save({"a": torch.ones(3)}, old)
    before = old.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="is no torch file; it is not replaced"):
            convert(folders / "dcp", note, to="torch", overwrite=overwrite)
        with pytest.raises(CheckpointError, match="exists and is not a file"):
            convert(folders / "dcp", folder, to="torch", overwrite=overwrite)
    torch.save({"fraction": Fraction(1, 2)}, old)
    with pytest.raises(CheckpointError, match=r"torch file without weights .*asks for `fractions.Fraction`"):
        convert(folders / "dcp", old, to="torch", overwrite=True)
    old.write_bytes(before)
    with pytest.raises(CheckpointError, match="exists already") as error:
        convert(folders / "dcp", old, to="torch")
    assert error.value.tries == ("--overwrite",) and old.read_bytes() == before
    convert(folders / "dcp", old, to="torch", overwrite=True)
    assert_same(torch.load(old, weights_only=True), native_state)
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(old, old, to="torch", overwrite=True, model_from=folders / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.pt", "notes.pt", "old.pt"]
    assert note.read_text() == "precious"


def test_a_file_in_the_source_is_not_replaced(folders, tmp_path):
    convert(folders / "dcp", tmp_path / "out", to="torch")
    before = (tmp_path / "out" / "model.pt").read_bytes()
    for name in ("model.pt", "other.pt"):
        with pytest.raises(CheckpointError, match="part of the source|one is inside the other"):
            convert(tmp_path / "out", tmp_path / "out" / name, to="torch", overwrite=True)
    assert (tmp_path / "out" / "model.pt").read_bytes() == before


def test_a_file_is_there_whole_or_not_at_all(folders, native_state, tmp_path, monkeypatch):
    dst = tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, dst)
    before = dst.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("converters.conversion.execute.write_manifest", _full_disk)
        with pytest.raises(CheckpointError, match=f"cannot write {dst}: No space left"):
            convert(folders / "dcp", dst, to="torch", overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == ["model.pt"] and dst.read_bytes() == before
        with pytest.raises(CheckpointError, match="No space left"):
            convert(folders / "dcp", dst, to="torch", overwrite=True, resume=True)
        assert dst.read_bytes() == before
    report = convert(folders / "dcp", dst, to="torch", overwrite=True, resume=True)
    assert report.resumed_bytes == sum(t.nbytes for t in native_state.values())
    assert_same(torch.load(dst, weights_only=True), native_state)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def _full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def adamw(state):
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(t)} for name, t in state.items()}
    return {"state": moments, "param_groups": [{"lr": 0.1, "params": list(state)}]}


NESTS = {  # what a file holds → how many entries of what are left out
    "flat": (lambda model: model, {}),
    "model": (lambda model: {"model": model}, {}),
    "training": (
        lambda model: {"model": model, "optimizer": adamw(model), "epoch": 3, "train_state": {"step": 7}},
        {"optimizer": 43, "epoch": 1, "train_state": 1},
    ),
    "another trainer's": (
        lambda model: {"state_dict": model, "optim": adamw(model), "global_step": torch.tensor(3)},
        {"optim": 43, "global_step": 1},
    ),
    "flat training": (lambda model: model | {"optimizer": adamw(model), "step": 3}, {"optimizer": 43, "step": 1}),
    "deep": (lambda model: {"app": {"model": model, "step": 1}}, {"app": 1}),
    "with RoPE's table": (lambda model: {"model": model | {"freqs_cis": torch.ones(2)}}, {}),
}


@pytest.mark.parametrize(
    ("nest", "names"), [*((nest, "native") for nest in NESTS), *((nest, "hf") for nest in NESTS if "RoPE" not in nest)]
)
def test_the_model_is_found_in_what_a_trainer_saved(folders, hf_state, native_state, nest, names, tmp_path):
    make, left_out = NESTS[nest]
    torch.save(make(native_state if names == "native" else hf_state), tmp_path / "file.pt")
    report = convert(tmp_path / "file.pt", tmp_path / "hf", to="hf", model_from=folders / "hf")
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), hf_state)
    assert report.left_out == left_out
    assert list(report.dropped) == (["model.freqs_cis"] if nest == "with RoPE's table" else [])


@pytest.mark.parametrize("nest", ["flat", "training", "another trainer's", "flat training", "deep"])
def test_dcp_that_nests_the_model_and_what_torch_makes_of_it(folders, hf_state, native_state, nest, tmp_path):
    make, left_out = NESTS[nest]
    dcp.save(make(native_state), checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "file.pt"))
    for src in ("dcp", "file.pt"):
        report = convert(tmp_path / src, tmp_path / "hf", to="hf", model_from=folders / "hf", overwrite=True)
        assert_same(load_file(tmp_path / "hf" / "model.safetensors"), hf_state)
        assert report.left_out.keys() == left_out.keys()


def test_modules_nested_as_dicts_are_flattened(folders, hf_state, native_state, tmp_path):
    nested = {}
    for name, value in native_state.items():
        *outer, last = name.split(".")
        place = nested
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    torch.save(nested, tmp_path / "file.pt")
    convert(tmp_path / "file.pt", tmp_path / "hf", to="hf", model_from=folders / "hf")
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), hf_state)


def test_a_file_without_a_model_is_refused_with_what_it_holds(folders, native_state, tmp_path):
    torch.save({"optimizer": adamw(native_state), "net": {"a": torch.ones(2)}}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"layers|no tensor has a name"):
        convert(tmp_path / "file.pt", tmp_path / "hf", to="hf", model_from=folders / "hf")
    torch.save({"model": dict(list(native_state.items())[3:]), "epoch": 1}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="3 problems") as error:
        convert(tmp_path / "file.pt", tmp_path / "hf", to="hf", model_from=folders / "hf")
    assert "missing     model.tok_embeddings.weight" in error.value.message
