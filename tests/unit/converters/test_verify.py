"""converters/verify.py: sound checkpoints of every kind pass; any flipped bit, cut or swap is found."""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from converters.common.errors import CheckpointError
from converters.engine.read import CatalogReader
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.source.open import open_checkpoint
from converters.store.folder_output import FolderOutput
from converters.store.manifest import read_manifest
from converters.store.output import write_manifest
from converters.verify import verify
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.uploaded import STORES, in_store


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, reads=["verify", "open_checkpoint"])


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """One of each kind: ours (DCP, HF), and what transformers and stock torch write."""
    folder = tmp_path_factory.mktemp("verify")
    write_llama(folder / "theirs_hf", vocab_size=302)
    convert(
        folder / "theirs_hf", folder / "ours_dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2, tp=2))
    )
    convert(folder / "ours_dcp", folder / "ours_hf", to="hf", options=OutputOptions(shard_bytes=30_000))
    state = {"a": torch.randn(9, 5), "n": {"b": torch.randn(7).bfloat16()}, "step": 3}
    dcp.save(state, checkpoint_id=str(folder / "theirs_dcp"), no_dist=True)
    (folder / "theirs_pt").mkdir()
    torch.save(state, folder / "theirs_pt" / "model.pt")
    return folder


KINDS = ("ours_dcp", "ours_hf", "theirs_hf", "theirs_dcp", "theirs_pt")


@pytest.mark.parametrize("kind", KINDS)
def test_sound_checkpoints_pass(sound, kind):
    report = verify(sound / kind)
    assert report.ok, report
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["structure"] == "ok"
    assert outcomes["files"] == ("not possible" if kind == "theirs_hf" else "ok")
    assert outcomes["values"] == ("ok" if kind.startswith("ours") else "not possible")
    assert outcomes["names and shapes"] == ("not possible" if kind in ("theirs_dcp", "theirs_pt") else "ok")
    assert ("all checks passed" in report.verdict) == kind.startswith("ours")


@pytest.mark.parametrize("kind", KINDS)
def test_quick_claims_nothing_about_tensors(sound, kind):
    report = verify(sound / kind, quick=True)
    assert report.ok and "values" in report.verdict.split("not checked: ")[1]
    (values,) = [check for check in report.checks if check.name == "values"]
    assert (values.outcome, values.detail) == ("not done", "no tensor was read (--quick)")
    (files,) = [check for check in report.checks if check.name == "files"]
    message = {"ours": "CRC32 of the", "hf": "carries no checksums", "dcp": "--quick", "pt": "--quick"}
    assert message["ours" if kind.startswith("ours") else kind.split("_")[1]] in files.detail


def test_quick_reads_the_small_files(sound, tmp_path):
    copy = shutil.copytree(sound / "ours_dcp", tmp_path / "copy")
    path = copy / "assets" / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"BPE", b"BPF"))
    report = verify(copy, quick=True)
    assert not report.ok and any(
        "tokenizer.json: its bytes have changed" in p for c in report.checks for p in c.problems
    )


@pytest.mark.parametrize("kind", ["ours_dcp", "ours_hf"])
def test_a_checkpoint_without_digests_is_reported_as_such(sound, kind, tmp_path):
    copy = shutil.copytree(sound / kind, tmp_path / "copy")
    tensors = read_manifest(copy).tensors
    write_manifest(FolderOutput(copy), tensors={fqn: replace(entry, digest="") for fqn, entry in tensors.items()})
    report = verify(copy)
    assert report.checks[-1].outcome == "not possible" and "written with --no-digest" in report.checks[-1].detail
    assert report.ok and "not checked: values" in report.verdict
    some = list(tensors)[3]
    write_manifest(FolderOutput(copy), tensors=tensors | {some: replace(tensors[some], digest="")})
    report = verify(copy)
    assert report.checks[-1].outcome == "warning" and "1 of 21 tensors have no digest" in report.checks[-1].detail


def test_damage_is_found_by_file_and_by_tensor(sound, tmp_path):
    """Two files changed and one missing: all are named, although such a folder does not even open."""
    copy = shutil.copytree(sound / "ours_dcp", tmp_path / "copy")
    with CatalogReader(open_checkpoint(copy)) as reader:
        chunk = reader.located("norm.weight", reader.catalog.tensors["norm.weight"].chunks[0])
    with (copy / chunk.file).open("r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\x11")
    (values,) = [check for check in verify(copy).checks if check.name == "values"]
    assert values.problems == ("norm.weight: its values have changed (digest)",)
    (copy / "assets" / "tokenizer.json").unlink()
    (copy / "titan_model.json").write_text("{}")
    message = "\n".join(problem for check in verify(copy).checks for problem in check.problems)
    assert "tokenizer.json: missing" in message and "titan_model.json: 2 bytes instead of" in message
    assert f"{chunk.file}: its bytes have changed" in message


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_items_without_a_crc_are_counted(kind, tmp_path):
    """torch.serialization.set_crc32_options(False), which some use to save faster: there is nothing to compare with."""
    torch.serialization.set_crc32_options(False)
    try:
        state = {"a": torch.randn(9, 5), "b": torch.randn(7)}
        if kind == "dcp":
            dcp.save(state, checkpoint_id=str(tmp_path / "x"), no_dist=True)
        else:
            torch.save(state, tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path / "x")
    (files,) = [check for check in report.checks if check.name == "files"]
    assert files.outcome == "not possible" and files.detail.startswith("2 items carry no CRC32")
    assert report.ok and "not checked:" in report.verdict and "files" in report.verdict


def test_one_file_of_ours_is_checked_against_the_manifest_of_its_folder(sound, tmp_path):
    copy = shutil.copytree(sound / "ours_hf", tmp_path / "copy")
    file = sorted(copy.glob("*.safetensors"))[0]
    assert "digests" in verify(file).checks[-1].detail
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert not verify(file).ok


@pytest.mark.parametrize(
    ("damage", "outcome", "message"),
    [
        ("total", "warning", "says total_size 5, the tensors take"),
        (
            "series",
            "failed",
            "model-00099-of-00006.safetensors: of the same series as the others, but not in the index",
        ),
        (
            "stranger",
            "warning",
            "consolidated.safetensors is not read: transformers takes model.safetensors.index",
        ),
    ],
)
def test_what_an_index_does_not_say(sound, tmp_path, damage, outcome, message):
    copy = shutil.copytree(sound / "ours_hf", tmp_path / "copy")
    (copy / "titan_manifest.json").unlink()
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    if damage == "total":
        index.write_text(json.dumps(content | {"metadata": {"total_size": 5}}))
    elif damage == "series":
        message = message.replace("00006", f"{len(shards):05d}")
        shutil.copy(copy / shards[0], copy / message.split(":")[0])
    else:
        shutil.copy(copy / shards[0], copy / "consolidated.safetensors")
    report = verify(copy, quick=True)
    (check,) = [check for check in report.checks if check.outcome in ("warning", "failed")]
    assert check.outcome == outcome and message in "\n".join([check.detail, *check.problems])
    assert report.ok == (outcome == "warning") and ("with warnings: " in report.verdict) == report.ok


@pytest.mark.parametrize("kind", ["ours_dcp", "ours_hf"])
def test_any_flipped_bit_is_found(sound, kind, tmp_path):
    """In any file of ours, the manifest included."""
    shutil.copytree(sound / kind, tmp_path / "copy")
    draw = random.Random(0)
    files = sorted(p for p in (tmp_path / "copy").rglob("*") if p.is_file())
    missed = []
    for file in files:
        good = file.read_bytes()
        for _ in range(4):
            place, bit = draw.randrange(len(good)), draw.randrange(8)
            file.write_bytes(good[:place] + bytes([good[place] ^ (1 << bit)]) + good[place + 1 :])
            if verify(tmp_path / "copy").ok:
                missed.append((file.name, place, bit))
        file.write_bytes(good)
    assert missed == []
    assert verify(tmp_path / "copy").ok


@pytest.mark.parametrize("kind", ["theirs_dcp", "theirs_pt"])
def test_flipped_data_of_stock_torch_is_found(sound, kind, tmp_path):
    """Stock loaders take it silently: they never compare the CRC32 that torch.save wrote."""
    shutil.copytree(sound / kind, tmp_path / "copy")
    (file,) = [p for p in (tmp_path / "copy").iterdir() if p.suffix in (".distcp", ".pt")]
    good = file.read_bytes()
    state = torch.load(sound / "theirs_pt" / "model.pt")
    place = good.index(state["a"].numpy().tobytes())
    file.write_bytes(good[: place + 3] + bytes([good[place + 3] ^ 1]) + good[place + 4 :])
    report = verify(tmp_path / "copy")
    assert not report.ok
    assert any("a at [0, 0]" in problem for check in report.checks for problem in check.problems)


def test_a_swapped_tensor_is_found_by_name(sound, tmp_path):
    """The same files with two tensors exchanged and every checksum of the container made anew."""
    shutil.copytree(sound / "theirs_hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    ours = sound / "ours_hf"
    shutil.copytree(ours, tmp_path / "copy")
    (file,) = [p for p in (tmp_path / "copy").glob("*.safetensors") if "model.norm.weight" in load_file(p)]
    content = load_file(file)
    content["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(content, file, metadata={"format": "pt"})
    report = verify(tmp_path / "copy")
    assert not report.ok and any(file.name in p for check in report.checks for p in check.problems)


@pytest.mark.parametrize("kind", ["ours_dcp", "ours_hf"])
def test_a_changed_value_under_new_checksums_is_found_by_its_digest(sound, kind, tmp_path):
    """Files and manifest agree in every CRC32, as after a faulty copy that was sealed: only the digest knows better."""
    copy = shutil.copytree(sound / kind, tmp_path / "copy")
    fqn = "layers.0.attention.wq.weight" if kind == "ours_dcp" else "model.layers.0.self_attn.q_proj.weight"
    with CatalogReader(open_checkpoint(copy)) as reader:
        chunk = reader.located(fqn, reader.catalog.tensors[fqn].chunks[0])
    with (copy / chunk.file).open("r+b") as file:
        file.seek(chunk.byte_offset)
        (byte,) = file.read(1)
        file.seek(chunk.byte_offset)
        file.write(bytes([byte ^ 1]))
    write_manifest(FolderOutput(copy), tensors=read_manifest(copy).tensors)
    report = verify(copy)
    assert [check.name for check in report.checks if check.outcome == "failed"] == ["values"]
    assert report.checks[-1].problems == (f"{fqn}: its values have changed (digest)",)


@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "added"])
def test_files_that_changed(sound, damage, tmp_path):
    shutil.copytree(sound / "ours_dcp", tmp_path / "copy")
    file = tmp_path / "copy" / "__1_0.distcp"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "emptied":
        file.write_bytes(b"")
    elif damage == "removed":
        file.unlink()
    else:
        (tmp_path / "copy" / "assets" / "stranger.bin").write_bytes(b"x")
    report = verify(tmp_path / "copy")
    assert not report.ok
    assert any(
        name in text
        for check in report.checks
        for text in (check.detail, *check.problems)
        for name in ("__1_0.distcp", "stranger.bin")
    )


def test_names_that_are_not_the_model_s(sound, tmp_path):
    shutil.copytree(sound / "theirs_hf", tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    report = verify(tmp_path / "copy")
    (failed,) = [check for check in report.checks if check.outcome == "failed"]
    assert failed.name == "names and shapes" and "missing     model.layers.2." in failed.detail


def test_models_we_do_not_know_are_checked_as_files(sound, tmp_path):
    shutil.copytree(sound / "theirs_hf", tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MambaForCausalLM"]}))
    report = verify(tmp_path / "copy")
    assert report.ok and report.checks[1].outcome == "not possible"


def test_values_that_are_no_numbers_are_reported(sound, tmp_path):
    shutil.copytree(sound / "theirs_hf", tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][:2] = torch.tensor([float("nan"), float("inf")])
    save_file(tensors, file)
    report = verify(tmp_path / "copy")
    assert report.ok and report.non_finite == {"model.norm.weight": 2}


def test_nothing_there_is_an_error_and_no_checkpoint_a_failure(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        verify(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    report = verify(tmp_path)
    assert not report.ok and "Git LFS pointer" in report.checks[0].detail
