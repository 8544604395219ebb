"""Checkpoints that are read from an object store: the same as from a folder, and never a whole file at once."""

import json
import os
import shutil
from itertools import islice

import pytest
import torch
from safetensors.torch import save_file

from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.common.names import DCP_METADATA, MANIFEST
from converters.containers.safetensors_write import plan_safetensors
from converters.engine.journal import files_identity, plan_fingerprint
from converters.engine.read import CatalogReader
from converters.formats.base import OutputOptions
from converters.source.open import open_checkpoint
from converters.store import base
from converters.store.location import Location
from converters.verify import verify
from tests.checkpoint_forms import FORMS, write_byte_ranks, write_form
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.pretend_store import LAG, Objects, key_of
from tests.uploaded import upload
from titan_tools.infer.find import find_checkpoints, newest_step
from trainer.checkpoints.run_lock import refuse_other_run
from trainer.checkpoints.step_folders import size_problem

pytestmark = pytest.mark.parametrize("store", ["pretend"], indirect=True)
OF_FOLDERS = {"hf cache, repository": "its snapshot is found by links"}


@pytest.fixture(autouse=True)
def registered(place):
    """The scheme of the store."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "hf"
    write_llama(folder, vocab_size=302, rope_scaling=None)
    (folder / "tokenizer.json").unlink()
    write_byte_ranks(folder / "tokenizer.model")  # torchtune's code opens no other
    (folder / "LICENSE").write_text("Free.")  # carried along with the weights
    return folder


def put(location, name, data):
    """Replace an object."""
    file = Objects().upload()
    file.write(data)
    Objects().put(f"{key_of(location)}/{name}", file)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", [form for form in FORMS if form not in OF_FOLDERS])
def test_every_form_gives_the_same_output(llama, form, tmp_path):
    source, model_from = write_form(FORMS[form], llama, tmp_path)
    to = "dcp" if form.startswith("hf") else "hf"
    reports = [
        convert(src, tmp_path / out, to=to, model_from=config)
        for src, out, config in (
            (source, "folder", model_from),
            (upload(source), "store", model_from and upload(model_from)),
        )
    ]
    assert contents(tmp_path / "store") == contents(tmp_path / "folder")
    assert reports[1].source.startswith("pretend://") and reports[1].source.endswith(f"/{source.name}")
    assert len(reports[0].remarks) == len(reports[1].remarks)
    assert reports[0].other_files == reports[1].other_files


def test_resharding_copies_the_files_beside(llama, tmp_path):
    convert(llama, tmp_path / "dcp", to="dcp")
    (tmp_path / "dcp" / "notes").mkdir()
    (tmp_path / "dcp" / "notes" / "run.txt").write_text("a note")
    (tmp_path / "dcp" / MANIFEST).unlink()
    for name, src in (("folder", tmp_path / "dcp"), ("store", upload(tmp_path / "dcp"))):
        assert "notes/run.txt" in reshard(src, tmp_path / name, num_files=3).other_files
    assert contents(tmp_path / "store") == contents(tmp_path / "folder")


def test_opening_reads_headers_and_a_box_its_bytes(tmp_path):
    save_file({"a": torch.arange(2**20, dtype=torch.int32).view(1024, 1024)}, tmp_path / "model.safetensors")
    catalog = open_checkpoint(upload(tmp_path))
    assert catalog.store.num_read["model.safetensors"] < 2000
    catalog.store.num_read.clear()
    with CatalogReader(catalog) as reader:
        assert reader.read("a", Box((1000, 0), (2, 1024)))[1, 3] == 1001 * 1024 + 3
    assert catalog.store.num_read["model.safetensors"] == 2 * 1024 * 4
    assert not (catalog.root / "model.safetensors").exists()
    with pytest.raises(OSError):
        (catalog.root / "model.safetensors").open()


def test_beside_a_file_only_usual_names_are_copied(llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "hf")
    (folder / "metrics.json").write_text("{}")
    torch.save({"a": torch.zeros(2)}, folder / "other.pt")
    catalogs = [open_checkpoint(upload(place)) for place in (folder / "other.pt", folder / "model.safetensors")]
    assert all((catalog.root / "config.json").is_file() for catalog in catalogs)
    assert not any((catalog.root / "metrics.json").is_file() for catalog in catalogs)
    (folder / "other.pt").unlink()
    assert (open_checkpoint(upload(folder)).root / "metrics.json").is_file()


def test_an_object_that_is_replaced_while_it_is_read(llama, tmp_path):
    location, data = upload(llama), (llama / "model.safetensors").read_bytes()
    reader = CatalogReader(open_checkpoint(location))
    reader.read("model.norm.weight", Box((0,), (32,)))
    reader.check_unchanged()
    put(location, "model.safetensors", data)
    with pytest.raises(CheckpointError, match="model.safetensors: changed while it was being read"):
        reader.check_unchanged()
    reader = CatalogReader(open_checkpoint(location))
    put(location, "model.safetensors", data)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        reader.read("model.norm.weight", Box((0,), (32,)))
    reader = CatalogReader(open_checkpoint(location))
    Objects().delete(f"{key_of(location)}/model.safetensors")
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        reader.check_unchanged()


def test_a_replaced_object_is_another_source(llama, tmp_path):
    """`--resume` continues only with the same source."""
    location, data = upload(llama), (llama / "model.safetensors").read_bytes()

    def identities():
        catalog = open_checkpoint(location)
        target = plan_safetensors(CatalogReader(catalog).tensors)
        return plan_fingerprint(catalog, target, {}), files_identity(catalog)

    first = identities()
    assert identities() == first
    put(location, "model.safetensors", data)
    second = identities()
    assert first[0] != second[0] and first[1] != second[1]
    put(location, "config.json", (llama / "config.json").read_bytes())
    assert identities()[0] not in (first[0], second[0])


def test_a_list_that_lags_hides_no_file_of_a_whole_checkpoint(llama, tmp_path, monkeypatch):
    convert(llama, tmp_path / "dcp", to="dcp", options=OutputOptions(shard_bytes=40_000))
    monkeypatch.setenv(LAG, "1000")
    location = upload(tmp_path / "dcp", is_listed=False)
    assert (
        not Objects().listed(key_of(location))
        and len(open_checkpoint(location).tensor_files) > 2
        and verify(location).ok
    )
    other = shutil.copytree(tmp_path / "dcp", tmp_path / "other")
    (other / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="no such object"):
        open_checkpoint(upload(other, is_listed=False))


def test_a_list_that_lags_hides_no_small_file_of_a_folder(llama, place, tmp_path, monkeypatch):
    monkeypatch.setenv(LAG, "1000")
    convert(llama, place / "dcp", to="dcp")  # its tokenizer is in a folder of its own
    convert(place / "dcp", tmp_path / "back", to="hf")
    convert(llama, tmp_path / "again", to="hf")
    assert contents(tmp_path / "back").keys() == contents(tmp_path / "again").keys()
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (llama / "tokenizer.model").read_bytes()


def test_a_store_that_cannot_be_asked_is_no_missing_file(llama, tmp_path, monkeypatch):
    """Or a run would go on from an older step, and a save would take its folder for one that was removed."""
    convert(llama, tmp_path / "dcp", to="dcp")
    location = upload(tmp_path / "dcp")

    def busy(*_):
        raise CheckpointError("503 Slow Down")

    monkeypatch.setattr(Objects, "size", busy)
    asked = (base.is_present, base.is_file_at, base.names_at, base.text_at, size_problem, open_checkpoint)
    for ask in asked:
        with pytest.raises(CheckpointError, match="^503 Slow Down$"):
            ask(location)
    with pytest.raises(CheckpointError, match="^503 Slow Down$"):
        refuse_other_run(location)


def test_commands_take_a_uri_as_it_was_typed(llama, titan, tmp_path):
    location = str(upload(llama))
    folder = titan("inspect", llama, "--json").stdout
    shown = json.loads(titan("inspect", location, "--json").stdout)
    assert shown == json.loads(folder) | {"path": location}
    assert f"{location}: " in titan("verify", location).stdout
    done = titan("convert", "auto", location, tmp_path / "out", "--to", "dcp")
    assert (done.returncode, (tmp_path / "out" / DCP_METADATA).is_file()) == (0, True)
    assert titan("diff", location, tmp_path / "out").returncode == 0
    options = ("--prompt", "a", "--max-new-tokens", "3", "--dtype", "float32")
    assert titan("infer", location, *options).stdout == titan("infer", llama, *options).stdout
    prepare = ("data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "index", "--tokenizer")
    (tmp_path / "text.txt").write_text("A text of a few words.\n" * 200)
    indexes = [titan(*prepare, place, "--overwrite", "--json").stdout for place in (llama, location)]
    assert len({json.dumps(json.loads(index) | {"secs": 0, "tokenizer": ""}) for index in indexes}) == 1
    for words, message in {
        ("inspect", "s3://bucket/step-1"): "s3://bucket/step-1: s3:// cannot be read",
        ("inspect", "pretend://bucket/none"): "pretend://bucket/none: no such",
        ("inspect", location, "--plot", "run.png"): f"{location}: is not a path on this machine",
        ("inspect", tmp_path, location, "--plot", "run.png"): f"{location}: is not a path on this machine",
        ("download", "a/b", location): f"{location}: is not a path on this machine",
        ("data", "prepare", location): f"{location}: is not a path on this machine",
        ("data", "prepare", "--out", location): f"{location}: is not a path on this machine",
        ("convert", "hf-to-dcp", f"{location}/", location): f"{location} is the source itself",
    }.items():
        done = titan(*words)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_folders_of_other_things_are_named(llama, tmp_path):
    run = tmp_path / "run" / "checkpoint"
    convert(llama, run / "step-10", to="dcp")
    shutil.copytree(run / "step-10", run / "step-20")
    (run / "step-20" / DCP_METADATA).unlink()
    location = upload(tmp_path / "run")
    for place, called in ((location, "the folder of a run"), (location / "checkpoint", "a folder of checkpoints")):
        with pytest.raises(CheckpointError, match=called) as caught:
            open_checkpoint(place)
        assert caught.value.tries == (f"{location}/checkpoint/step-10",)
        assert newest_step(place) == location / "checkpoint/step-10"
        assert [found.place for found in islice(find_checkpoints(place), 1)] == [location / "checkpoint/step-10"]
    (tmp_path / "wrapped" / "pytorch_model_fsdp_0").mkdir(parents=True)
    for name in os.listdir(run / "step-10"):
        if name.startswith("_") or name == DCP_METADATA:
            shutil.copy(run / "step-10" / name, tmp_path / "wrapped" / "pytorch_model_fsdp_0" / name)
    location = upload(tmp_path / "wrapped")
    with pytest.raises(CheckpointError, match="not a checkpoint, but holds some") as caught:
        open_checkpoint(location)
    assert caught.value.tries == (f"{location}/pytorch_model_fsdp_0 --model-from FOLDER",)
    assert open_checkpoint(Location(f"{location}/pytorch_model_fsdp_0/")).container == "dcp"


def test_reading_a_folder_leaves_no_file_open(llama, store):
    before = len(os.listdir("/proc/self/fd"))
    catalog = open_checkpoint(llama)
    with CatalogReader(catalog) as reader:
        reader.read("model.norm.weight", Box((0,), (32,)))
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
