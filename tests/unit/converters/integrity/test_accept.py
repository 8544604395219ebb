"""`verify` with `accept`: what was changed on purpose is listed and accepted; what is damaged is refused."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import converters.store.manifest as manifests
from converters.common.errors import CheckpointError
from converters.common.names import MANIFEST
from converters.formats.base import OutputOptions
from converters.source.open import open_checkpoint
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert
from tests.models.llama import write as write_llama
from trainer.checkpoints.export_plan import refuse_others

NORM = "model.norm.weight"
accept = partial(verify, accept=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accept")
    write_llama(folder / "theirs", vocab_size=302)
    convert(folder / "theirs", folder / "dcp", to="dcp")
    convert(folder / "dcp", folder / "hf", to="hf")
    convert(folder / "dcp", folder / "shards", to="hf", options=OutputOptions(shard_bytes=60_000))
    return folder


@pytest.fixture
def copy(sound, tmp_path):
    return lambda kind: shutil.copytree(sound / kind, tmp_path / kind)


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def is_accepted(folder, *, files, tensors):
    report = accept(folder)
    assert report.ok, report
    assert report.changes.files == files and report.changes.tensors == tensors
    assert "rewritten" in report.verdict
    assert verify(folder).ok and verify(folder).verdict == "all checks passed"
    assert read_manifest(folder).accepted
    again = accept(folder)
    assert again.ok and (again.changes.files, again.changes.tensors) == ({}, {}) and "was not changed" in again.verdict


def test_a_file_that_a_manifest_may_not_list_is_refused(copy):
    folder = copy("hf")
    before = (folder / MANIFEST).read_bytes()
    (folder / "notes: a.txt").write_text("one")
    with pytest.raises(CheckpointError, match="titan_manifest.json of .* names the file 'notes: a.txt'"):
        accept(folder)
    assert (folder / MANIFEST).read_bytes() == before


def is_refused(folder, check, output):
    before = (folder / MANIFEST).read_bytes()
    report = accept(folder)
    assert not report.ok and report.changes is None
    (failed,) = [c for c in report.checks if c.outcome == "failed"]
    assert failed.name == check and output in "\n".join([failed.detail, *failed.problems])
    assert (folder / MANIFEST).read_bytes() == before
    assert not list(folder.glob(f"{MANIFEST}.*"))


def test_the_error_names_each_file_and_how_to_go_on(copy):
    """Damage or an intended change: the error says both, and its second command leads on."""
    folder = copy("hf")
    edit_config(folder, initializer_range=0.015625)
    tokenizer = folder / "tokenizer_config.json"
    raw = tokenizer.read_bytes().replace(b": ", b" :", 1)
    assert raw != tokenizer.read_bytes()
    tokenizer.write_bytes(raw)  # of the same length
    (folder / "extra.txt").write_text("x")
    with pytest.raises(CheckpointError, match="changed or damaged since titan wrote it") as error:
        open_checkpoint(folder)
    output = error.value.message
    old = json.loads((folder / MANIFEST).read_text())["files"]["config.json"]["size"]
    assert f"\n  config.json: {(folder / 'config.json').stat().st_size:,} bytes instead of {old:,}" in output
    assert (
        "\n  tokenizer_config.json: its bytes have changed" in output and "\n  extra.txt: not in the manifest" in output
    )
    assert error.value.tries == (f"titan verify {folder}", f"titan verify {folder} --accept")
    assert accept(folder).ok
    open_checkpoint(folder)


def test_save_pretrained_into_the_folder(copy):
    from transformers import LlamaForCausalLM

    folder = copy("hf")
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(folder)
    report = accept(folder)
    assert report.ok and report.changes.tensors == {NORM: "its values have changed (digest)"}
    assert {"config.json", "model.safetensors"} <= report.changes.files.keys()
    assert verify(folder).verdict == "all checks passed"


def test_an_export_that_was_changed_is_not_replaced_by_the_next_one(copy):
    """Neither before the change is accepted nor after."""
    folder = copy("hf")
    refuse_others(folder)
    edit_config(folder, initializer_range=0.5)
    for output in ("changed or damaged since titan wrote it", "it was changed after titan wrote it"):
        with pytest.raises(CheckpointError, match=f"(?s)would be replaced by the export.*{output}") as error:
            refuse_others(folder)
        assert error.value.tries[0] == f"mv {folder} {folder}-kept"
        assert accept(folder).ok


def test_a_flipped_value_of_safetensors_is_shown(copy):
    folder = copy("hf")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    last = list(load_file(path))[-1]
    report = accept(folder)
    assert report.ok and len(report.changes.tensors) == 1, last
    (values,) = [check for check in report.checks if check.name == "values"]
    assert values.outcome == "changed" and values.problems[0].endswith("its values have changed (digest)")


def test_files_and_dtypes_that_changed(copy):
    folder = copy("hf")
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copytree(folder, folder.parent / "before")
    (folder / "NOTES.md").write_text("mine")
    (folder / "tokenizer_config.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.bfloat16() if name == NORM else t for name, t in tensors.items()}, folder / "model.safetensors")
    report = accept(folder)
    assert report.ok and report.changes.tensors == {NORM: "bfloat16 [32] instead of float32 [32]"}
    assert report.changes.files["NOTES.md"] == "not in the manifest"
    assert report.changes.files["tokenizer_config.json"] == "missing"
    assert verify(folder).ok


def test_a_training_step_and_its_tokenizer(copy):
    folder = copy("dcp")
    tokenizer = folder / "assets" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    size = tokenizer.stat().st_size
    is_accepted(folder, files={"assets/tokenizer.json": f"{size:,} bytes instead of {size - 1:,}"}, tensors={})


def test_dcp_saved_anew_by_torch(copy):
    folder = copy("dcp")
    catalog = open_checkpoint(folder)
    state = {fqn: torch.zeros(entry.shape) for fqn, entry in catalog.tensors.items()}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    state["norm.weight"] += 1
    for path in folder.glob("*.distcp"):
        path.unlink()
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    report = accept(folder)
    assert report.ok and report.changes.tensors == {"norm.weight": "its values have changed (digest)"}
    assert verify(folder).ok


def test_saved_anew_by_torch_under_a_wrappers_names(copy):
    """The manifest lists the names without the wrapper, and so the folder opens afterwards."""
    folder = copy("dcp")
    state = {fqn: torch.zeros(entry.shape) for fqn, entry in open_checkpoint(folder).tensors.items()}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    for path in folder.glob("*.distcp"):
        path.unlink()
    dcp.save({f"_orig_mod.{fqn}": value for fqn, value in state.items()}, checkpoint_id=str(folder), no_dist=True)
    report = accept(folder)
    assert report.ok and report.changes.tensors == {}
    assert "removed the prefix `_orig_mod.`" in str([check.problems for check in report.checks])
    assert verify(folder).ok
    assert open_checkpoint(folder).tensors.keys() == state.keys()


def test_what_is_damaged_in_itself_is_refused(copy):
    folder = copy("dcp")
    (data,) = folder.glob("*.distcp")
    good = data.read_bytes()
    catalog = open_checkpoint(folder)
    from converters.engine.read import CatalogReader

    with CatalogReader(catalog) as reader:
        place = reader.located("norm.weight", catalog.tensors["norm.weight"].chunks[0]).byte_offset
    data.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    is_refused(folder, "files", "norm.weight at [0] in __0_0.distcp: its bytes have changed (CRC32)")
    data.write_bytes(good[:-1])
    is_refused(folder, "structure", "bytes, but .metadata places items")


def test_cut_missing_and_contradicted_hf_folders_are_refused(copy, sound):
    folder = copy("hf")
    weights, config = folder / "model.safetensors", folder / "config.json"
    good = weights.read_bytes()
    weights.write_bytes(good[:-4])
    is_refused(folder, "structure", "model.safetensors")
    weights.write_bytes(good)
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if name != NORM}, weights)
    is_refused(folder, "names and shapes", NORM)
    weights.write_bytes(good)
    edit_config(folder, num_hidden_layers=3)
    is_refused(folder, "names and shapes", "model.layers.2.")
    config.write_text("{")
    report = accept(folder)
    assert not report.ok and {c.name for c in report.checks if c.outcome == "failed"} >= {"json"}
    shards = copy("shards")
    sorted(shards.glob("model-*.safetensors"))[1].unlink()
    is_refused(shards, "structure", "model-00002-of")


def test_a_damaged_manifest_is_replaced_and_said(copy):
    folder = copy("hf")
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes().replace(b"float32", b"float16", 1))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert error.value.tries == (f"titan verify {folder} --accept",)
    report = accept(folder)
    assert report.ok and [c.problems for c in report.checks if c.name == "manifest"][0][0].endswith("its own CRC32")
    assert "could not be compared" in report.verdict
    assert verify(folder).verdict == "all checks passed"


def test_the_manifest_of_a_newer_titan_is_not_replaced(copy):
    folder = copy("hf")
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes().replace(b'"version": 2', b'"version": 3'))
    with pytest.raises(CheckpointError, match="version 3; this titan knows version 2"):
        accept(folder)


def test_a_failed_write_keeps_the_old_manifest(copy, monkeypatch):
    folder = copy("hf")
    edit_config(folder, initializer_range=0.5)
    before = (folder / MANIFEST).read_bytes()

    def full(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        accept(folder)
    assert (folder / MANIFEST).read_bytes() == before and not (folder / f"{MANIFEST}.tmp").exists()
    monkeypatch.undo()
    (folder / f"{MANIFEST}.tmp").write_bytes(before[:99])  # as a kill leaves it
    assert accept(folder).ok and verify(folder).ok and not (folder / f"{MANIFEST}.tmp").exists()


def test_a_file_that_changes_meanwhile(copy, monkeypatch):
    folder = copy("hf")
    edit_config(folder, initializer_range=0.5)
    before = (folder / MANIFEST).read_bytes()
    import converters.integrity.accept as accepting

    def meddle(*part):
        os.utime(folder / "config.json", ns=(1, 1))
        return manifests.sum_range(*part)

    monkeypatch.setattr(accepting, "sum_range", meddle)
    with pytest.raises(CheckpointError, match="changed while they were being checked"):
        accept(folder)
    assert (folder / MANIFEST).read_bytes() == before


def test_nothing_to_accept(sound, copy, tmp_path):
    with pytest.raises(CheckpointError, match="nothing to accept"):
        accept(sound / "theirs")
    with pytest.raises(CheckpointError, match="is a file"):
        accept(sound / "hf" / "model.safetensors")
    folder = copy("hf")
    (tmp_path / "secret").write_text("x")
    (folder / "link.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="link"):
        accept(folder)
    (folder / "link.txt").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(CheckpointError, match="not regular files"):
        accept(folder)
