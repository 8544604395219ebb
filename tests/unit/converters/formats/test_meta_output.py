"""Meta's format as we write it: the same file as one made by hand, there and back, verified, and what is refused."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch

from converters.common.errors import CheckpointError, UnsupportedError
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.models.llama import write_meta


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folders(request, tmp_path_factory):
    """hf/ as transformers wrote it, meta/ made of the same model by torch.save, dcp/ and ours/ converted from hf/."""
    root = tmp_path_factory.mktemp("meta")
    model = write_llama(root / "hf", vocab_size=302, rope_scaling=None, tie_word_embeddings=request.param)
    (root / "hf" / "tokenizer.model").write_text("IQ== 0\n")
    write_meta(root / "meta", model)
    convert(root / "hf", root / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=3, tp=2)))
    convert(root / "dcp", root / "ours", to="meta", source="dcp")
    return root


def load(folder, **options):
    return torch.load(folder / "consolidated.00.pth", weights_only=True, **options)


def files_in(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("mmap", [False, True])
def test_the_file_is_the_one_made_by_hand(folders, mmap):
    ours, theirs = load(folders / "ours", mmap=mmap), load(folders / "meta")
    assert ours.keys() == theirs.keys()  # a tied output is there, rope.freqs is not
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == torch.float32 for name in ours)


def test_params_are_those_of_the_model(folders):
    ours, theirs = (json.loads((folders / name / "params.json").read_text()) for name in ("ours", "meta"))
    del theirs["rope_theta"]  # 10000: a Llama 2, whose code knows no such argument and means this value
    assert {key: ours[key] for key in theirs} == theirs and "rope_theta" not in ours
    # Meta's loader calls ModelArgs(max_seq_len=…, max_batch_size=…, **params)
    assert not {"max_seq_len", "max_batch_size"} & ours.keys()
    assert (folders / "ours" / "tokenizer.model").read_text() == "IQ== 0\n"


def test_there_and_back_is_byte_identical(folders, tmp_path):
    convert(
        folders / "ours",
        tmp_path / "dcp",
        to="dcp",
        source="meta",
        options=OutputOptions(mesh=MeshShape(dp_shard=3, tp=2)),
    )
    assert files_in(tmp_path / "dcp") == files_in(folders / "dcp")
    convert(tmp_path / "dcp", tmp_path / "meta", to="meta")
    assert files_in(tmp_path / "meta") == files_in(folders / "ours")


def test_without_titan_s_own_files_it_is_a_meta_release(folders, tmp_path):
    shutil.copytree(folders / "ours", tmp_path / "bare")
    for name in ("titan_model.json", "titan_manifest.json"):
        (tmp_path / "bare" / name).unlink()
    convert(tmp_path / "bare", tmp_path / "dcp", to="dcp")
    with open_native(tmp_path / "dcp") as weights:
        assert not weights.info.args.tied  # params.json cannot say it; two equal tensors mean the same model
        assert weights.source.tensors.keys() == load(folders / "ours").keys()
    assert read_manifest(tmp_path / "dcp").tensors == read_manifest(folders / "ours").tensors


def test_hf_to_meta_at_once(folders, tmp_path):
    report = convert(folders / "hf", tmp_path / "meta", to="meta")
    assert files_in(tmp_path / "meta") == files_in(folders / "ours")
    assert report.num_files == 1 and report.num_bytes == (tmp_path / "meta" / "consolidated.00.pth").stat().st_size
    assert {"params.json", "tokenizer.model", "tokenizer.json"} <= {*report.other_files}


def test_a_release_saved_by_torch_is_rewritten_with_the_same_values(folders, tmp_path):
    convert(folders / "meta", tmp_path / "meta", to="meta")
    ours, theirs = load(tmp_path / "meta"), load(folders / "meta")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_digests_are_those_of_the_dcp(folders):
    digests = {name: tensor.digest for name, tensor in read_manifest(folders / "dcp").tensors.items()}
    meta = {name: tensor.digest for name, tensor in read_manifest(folders / "ours").tensors.items()}
    assert meta == {"output.weight": digests["tok_embeddings.weight"]} | digests


def test_verify_knows_every_byte(folders, tmp_path):
    report = verify(folders / "ours")
    assert report.ok and {check.outcome for check in report.checks} == {"ok"}
    shutil.copytree(folders / "ours", tmp_path / "bad")
    path = tmp_path / "bad" / "consolidated.00.pth"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not verify(tmp_path / "bad").ok
    (tmp_path / "bad" / "titan_manifest.json").unlink()
    assert not verify(tmp_path / "bad").ok  # the zip's own CRC32s are true, too


def test_cast(folders, tmp_path):
    convert(folders / "dcp", tmp_path / "meta", to="meta", dtype="bf16")
    ours, theirs = load(tmp_path / "meta"), load(folders / "meta")
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in theirs)


def test_the_advance_of_a_copy_ends_at_its_total(folders, tmp_path):
    seen = []

    def progress(total_bytes, what):
        seen.append(total_bytes)
        return nullcontext(lambda num_bytes: seen.append(-num_bytes))

    convert(folders / "dcp", tmp_path / "meta", to="meta", progress=progress)
    assert len(seen) > 2 and sum(seen) == 0


def test_what_params_json_cannot_say_is_refused_before_the_copy(tmp_path):
    write_llama(tmp_path / "hf")  # its RoPE scaling starts from 64 positions, Meta's from 8192
    for dry_run in (True, False):
        with pytest.raises(UnsupportedError, match="express RoPE of type llama3 .*original_max_position_embeddings 64"):
            convert(tmp_path / "hf", tmp_path / "meta", to="meta", dry_run=dry_run)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_unknown_formats_are_refused(folders, tmp_path):
    for unknown in ("gguf", "META", ""):
        with pytest.raises(UnsupportedError, match=f"unknown format: {unknown!r}") as error:
            convert(folders / "hf", tmp_path / "x", to=unknown)
        assert error.value.hint.startswith("known: dcp, hf, meta")
    assert list(tmp_path.iterdir()) == []


def test_other_sources_name_their_command(folders, tmp_path):
    for source, command, end in (
        ("hf", "titan convert hf-to-meta", "/x"),
        ("ours", "titan convert meta-to-dcp", "/x"),
    ):
        with pytest.raises(CheckpointError, match="not a DCP checkpoint") as error:
            convert(folders / source, tmp_path / "x", to="meta", source="dcp")
        assert [t.startswith(command) and t.endswith(end) for t in error.value.tries] == [True]
