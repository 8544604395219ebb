"""Checkpoints in an object store: the same as in a folder, written in order, and whole only with their marker."""

import json
import shutil
from contextlib import suppress

import pytest
from safetensors.torch import load_file, save_file

import converters.engine.units as units
from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.extensions import ExtensionError
from converters.common.names import MANIFEST
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.source.open import open_checkpoint
from converters.store.location import Location
from converters.store.manifest import check_files, read_manifest
from converters.store.outputs import register_outputs
from converters.verify import verify
from tests import pretend_store
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.unit.converters.samples import read_all

pytestmark = pytest.mark.parametrize("store", ["pretend"], indirect=True)
FORMATS = {
    "dcp": ("dcp", OutputOptions(), ".metadata"),
    "mesh": ("dcp", OutputOptions(mesh=MeshShape(pp=2, dp_shard=2, tp=2)), ".metadata"),
    "hf": ("hf", OutputOptions(shard_bytes=40_000), "model.safetensors.index.json"),
    "single": ("hf", OutputOptions(), "model.safetensors"),
    "fp8": ("hf", OutputOptions(quantize="fp8"), "model.safetensors"),
    "torch": ("torch", OutputOptions(), "model.pt"),
    "meta": ("meta", OutputOptions(num_shards=2), "consolidated.01.pth"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "hf"
    write_llama(folder, vocab_size=302, rope_scaling=None)
    return folder


@pytest.fixture(autouse=True)
def lagging(place, monkeypatch):
    """No list shows what was created or deleted."""
    monkeypatch.setenv(pretend_store.LAG, str(pretend_store.FOREVER))


@pytest.fixture
def puts(monkeypatch):
    """The keys of objects, but for the index, in the order in which they appear."""
    keys, put = [], pretend_store.Objects.put

    def recorded(objects, key, upload):
        keys.extend([key] if not key.endswith(pretend_store.INDEX) else [])
        put(objects, key, upload)

    monkeypatch.setattr(pretend_store.Objects, "put", recorded)
    return keys


@pytest.mark.parametrize("form", FORMATS)
def test_the_manifest_is_that_of_a_folder_but_for_crcs(llama, place, tmp_path, puts, form):
    to, options, marker = FORMATS[form]
    convert(llama, tmp_path / "folder", to=to, options=options)
    report = convert(llama, place / "x", to=to, options=options)
    assert [key.rpartition("/")[2] for key in puts[-2:]] == [MANIFEST, marker]
    catalog = open_checkpoint(place / "x")
    ours, theirs = read_manifest(catalog.root), read_manifest(tmp_path / "folder")
    assert ours.tensors == theirs.tensors and ours.files.keys() == theirs.files.keys()
    assert check_files(catalog.store) == [] and verify(place / "x").ok
    assert read_all(catalog) == read_all(open_checkpoint(tmp_path / "folder"))
    twice = [remark for remark in report.remarks if remark.startswith("read twice")]
    assert len(twice) == (form in ("mesh", "meta", "fp8"))
    assert not list((tmp_path / "pretend/parts").iterdir()) and not list((tmp_path / "pretend/journals").iterdir())


def test_a_single_file_is_one_object(llama, place, puts):
    convert(llama, place / "model.pt", to="torch")
    assert puts == ["bucket/runs/model.pt"]
    assert len(open_checkpoint(place / "model.pt").tensors) == len(open_checkpoint(llama).tensors)
    with pytest.raises(CheckpointError, match="exists already"):
        convert(llama, place / "model.pt", to="torch")
    pretend_store.Objects().put_bytes("bucket/runs/notes.pt", b"precious")
    with pytest.raises(CheckpointError, match="is no torch file; it is not replaced"):
        convert(llama, place / "notes.pt", to="torch", overwrite=True)
    pretend_store.Objects().put_bytes("bucket/runs/folder.pt/a", b"")
    pretend_store.Objects().catch_up("bucket/runs/folder.pt")
    with pytest.raises(CheckpointError, match="exists and is not a file"):
        convert(llama, place / "folder.pt", to="torch", overwrite=True)


def test_reshard_verify_and_flipped_bits(llama, place, tmp_path):
    convert(llama, place / "any", to="dcp")
    reshard(place / "any", place / "mesh", mesh=MeshShape(dp_shard=2, tp=2))
    assert verify(place / "mesh").ok
    assert read_all(open_checkpoint(place / "mesh")) == read_all(open_checkpoint(place / "any"))
    (path,) = (tmp_path / "pretend/objects").glob("*mesh%2F__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not verify(place / "mesh").ok


def test_an_interrupted_conversion_leaves_nothing(llama, place, tmp_path, monkeypatch):
    monkeypatch.setattr("converters.conversion.execute.write_manifest", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(llama, place / "x", to="dcp")
    assert not list((tmp_path / "pretend/objects").iterdir()) and not list((tmp_path / "pretend/parts").iterdir())


def test_whole_files_are_kept_and_resumed(llama, place, tmp_path, monkeypatch, puts):
    monkeypatch.setattr(units, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(units, "UNIT_BYTES", 4096)
    options = OutputOptions(shard_bytes=40_000)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("converters.conversion.execute.write_manifest", _interrupt)
        convert(llama, place / "x", to="hf", options=options, resume=True)
    with pytest.raises(CheckpointError):
        open_checkpoint(place / "x")
    written = {key for key in puts if key.endswith(".safetensors")}
    assert len(written) >= 3
    replaced = sorted(written)[0]
    objects = pretend_store.Objects()
    upload = objects.upload()
    upload.write(objects.read(replaced, 0, objects.size(replaced)))  # the same bytes: another object all the same
    objects.put(replaced, upload)
    puts.clear()
    report = convert(llama, place / "x", to="hf", options=options, resume=True)
    assert report.resumed_bytes > 0 and {key for key in puts if key in written} == {replaced}
    assert verify(place / "x").ok
    convert(llama, tmp_path / "folder", to="hf", options=options)
    assert read_manifest(open_checkpoint(place / "x").root).files == read_manifest(tmp_path / "folder").files


def test_a_second_writer_is_refused(llama, place):
    outputs = pretend_store.PretendOutputs()
    claim = outputs.claim(place / "x", files={"a": 1}, is_file=False, fingerprint=None, resume=False)
    with claim, pytest.raises(CheckpointError, match="another conversion is writing it now"):
        convert(llama, place / "x", to="dcp")


def test_overwriting_needs_to_be_asked_for(llama, place):
    convert(llama, place / "x", to="dcp")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(llama, place / "x", to="hf")
    convert(llama, place / "x", to="hf", overwrite=True)
    assert open_checkpoint(place / "x").container == "safetensors"


def test_a_change_is_accepted(llama, place):
    convert(llama, place / "x", to="hf")
    key = f"{pretend_store.key_of(place)}/x/config.json"
    config = pretend_store.Objects().read_json(key)
    pretend_store.Objects().put_bytes(key, json.dumps(config | {"initializer_range": 0.5}).encode())
    assert not verify(place / "x").ok
    report = verify(place / "x", accept=True)
    assert report.ok and report.changes.files.keys() == {"config.json"} and not report.changes.tensors
    assert verify(place / "x").ok and open_checkpoint(place / "x").manifest.accepted


@pytest.mark.parametrize("lag", [0, pretend_store.FOREVER])
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_kill_while_replacing_leaves_the_old_the_new_or_none(llama, place, tmp_path, monkeypatch, lag, to):
    """At each change of the store: what opens has every value of one of them, and verifies."""
    monkeypatch.setenv(pretend_store.LAG, str(lag))
    other = shutil.copytree(llama, tmp_path / "other")
    weights = load_file(llama / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors")

    def write(source, shard_bytes):
        convert(source, place / "x", to=to, options=OutputOptions(shard_bytes=shard_bytes), overwrite=True)
        return read_all(open_checkpoint(place / "x"))

    whole = [write(other, 30_000), write(llama, 50_000)]
    assert whole[0] != whole[1]
    for number in range(0, 1000, 9 if lag else 1):
        write(other, 30_000)
        with monkeypatch.context() as patched:
            store_that_dies(patched, after=number)
            with suppress(Killed):
                write(llama, 50_000)
                break
        try:
            found = read_all(open_checkpoint(place / "x"))
        except CheckpointError:
            continue
        assert found in whole and verify(place / "x").ok and open_checkpoint(place / "x").manifest, number
    assert number > 10
    assert read_all(open_checkpoint(place / "x")) == whole[1] and verify(place / "x").ok


class Killed(BaseException):
    """The process ends here."""


def store_that_dies(monkeypatch, *, after):
    """Only `after` changes of the store happen; the next one, and all that clean up after it, do not."""
    left = [after]

    def dying(change):
        def changed(objects, key, *data):
            if not left[0]:
                raise Killed
            left[0] -= 1
            change(objects, key, *data)

        return changed

    for name in ("put", "delete"):
        monkeypatch.setattr(pretend_store.Objects, name, dying(getattr(pretend_store.Objects, name)))


def test_torchtune_needs_a_path(llama, place):
    with pytest.raises(UnsupportedError, match="is not a path on this machine"):
        convert(llama, place / "x", to="torchtune")


def test_an_unknown_scheme_is_refused(llama, place):
    with pytest.raises(UnsupportedError, match=r"nowhere:// cannot be written to"):
        convert(llama, Location("nowhere://x/y"), to="dcp")


def test_what_lacks_a_function_is_not_registered(place):
    class Half:
        only_appends = True

        def check(self, location, **options): ...

    with pytest.raises(ExtensionError, match=r"what makes the outputs of half:// has no free_bytes and no "):
        register_outputs("half", Half())


def _interrupt(*arguments, **options):
    raise KeyboardInterrupt
