"""The manifest: vouches for every file, and notices whatever happens to them or to itself."""

import json
import os
import random
import zlib

import pytest

from converters.common.errors import CheckpointError
from converters.common.names import MANIFEST
from converters.store.folder_output import FolderOutput
from converters.store.manifest import (
    FileSum,
    Manifest,
    TensorSum,
    check_files,
    check_sizes,
    dump_manifest,
    read_manifest,
    sum_file,
)
from converters.store.output import write_manifest

TENSORS = {"w": TensorSum("bfloat16", (2, 3), "00" * 16)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/tokenizer.json").write_text("{}")
    (tmp_path / "data.bin").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty").touch()
    write_manifest(FolderOutput(tmp_path), tensors=TENSORS)
    return tmp_path


def test_round_trip(folder):
    manifest = read_manifest(folder)
    assert manifest.tensors == TENSORS
    assert sorted(manifest.files) == ["assets/tokenizer.json", "data.bin", "empty"]
    assert (
        manifest.files["data.bin"] == sum_file(folder / "data.bin") == FileSum(2560, manifest.files["data.bin"].crc32)
    )
    assert check_sizes(folder) == manifest
    assert check_files(folder) == []
    assert check_files(folder, ["data.bin"]) == []


def test_known_sums_are_not_read_again(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    manifest = write_manifest(FolderOutput(tmp_path), tensors={}, files={"a": FileSum(3, 12345)})
    assert manifest.files["a"].crc32 == 12345
    with pytest.raises(CheckpointError, match=r"missing:\n  b"):
        write_manifest(FolderOutput(tmp_path), tensors={}, files={"b": FileSum(3, 1)})


def test_it_is_synced_before_it_replaces_the_old_one(folder, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: (calls.append(name), call(*given))[1])
    write_manifest(FolderOutput(folder), tensors=TENSORS)
    assert calls == ["fsync", "replace", "fsync"]  # the file, then the names in its folder


def test_a_folder_without_one_has_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert check_sizes(tmp_path) is None
    with pytest.raises(CheckpointError, match="nothing to compare"):
        check_files(tmp_path)


def test_missing_short_changed_and_strange_files_are_reported_together(folder):
    (folder / "empty").unlink()
    (folder / "data.bin").write_bytes(b"short")
    (folder / "assets/tokenizer.json").write_text("[]")
    (folder / "stranger").touch()
    with pytest.raises(CheckpointError, match=r"(?s)data.bin: 5 bytes instead of 2,560.*empty: missing"):
        check_sizes(folder)
    problems = "\n".join(check_files(folder))
    for part in ("data.bin: 5 bytes", "empty: missing", "tokenizer.json: its bytes", "stranger: not in the manifest"):
        assert part in problems


def test_a_longer_file_is_found_by_its_size(folder):
    (folder / "data.bin").write_bytes(bytes(2561))
    with pytest.raises(CheckpointError, match="data.bin: 2,561 bytes instead of 2,560"):
        check_sizes(folder)


@pytest.mark.parametrize("part_bytes", [1, 256, 1000, 2560, 1 << 20])
def test_large_files_are_summed_in_parts(folder, monkeypatch, part_bytes):
    monkeypatch.setattr("converters.store.manifest._PART_BYTES", part_bytes)
    assert check_files(folder) == []
    path = folder / "data.bin"
    good = path.read_bytes()
    for at in (0, 255, 256, 999, 1000, 2559):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert check_files(folder) == ["data.bin: its bytes have changed (CRC32)"]


@pytest.mark.parametrize("part_bytes", [1000, 1 << 30])
def test_every_flipped_bit_is_found(folder, monkeypatch, part_bytes):
    monkeypatch.setattr("converters.store.manifest._PART_BYTES", part_bytes)
    generator = random.Random(0)
    files = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size]
    for _ in range(300):
        path = generator.choice(files)
        good = path.read_bytes()
        broken = bytearray(good)
        broken[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        path.write_bytes(broken)
        try:
            found = check_files(folder)
        except CheckpointError:
            found = ["the manifest itself"]
        path.write_bytes(good)
        assert found, path


def test_every_bit_of_the_manifest_counts(tmp_path):
    """White space and the spelling of escapes, too."""
    write_manifest(FolderOutput(tmp_path), tensors={"wäight": TensorSum("float32", (1,), "")}, files={})
    good = (tmp_path / MANIFEST).read_bytes()
    for place in range(len(good)):
        for bit in range(8):
            (tmp_path / MANIFEST).write_bytes(good[:place] + bytes([good[place] ^ (1 << bit)]) + good[place + 1 :])
            with pytest.raises(CheckpointError):
                read_manifest(tmp_path)


def test_a_manifest_of_the_first_version_is_read(tmp_path):
    body = {"version": 1, "tensors": {}, "files": {}}
    crc = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    (tmp_path / MANIFEST).write_text(json.dumps({"crc32": crc} | body, indent=1))
    assert read_manifest(tmp_path).tensors == {}
    (tmp_path / MANIFEST).write_text(json.dumps({"crc32": crc + 1} | body, indent=1))
    with pytest.raises(CheckpointError, match="its own CRC32"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/dev/zero", "a/../../x", "~/x", "a\\b", "a//b", ""])
def test_a_manifest_may_not_point_out_of_its_folder(tmp_path, name):
    with pytest.raises(CheckpointError, match="may lie outside"):
        _seal(tmp_path, {name: FileSum(0, 0)})


def test_a_pipe_in_place_of_a_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    _seal(tmp_path, {"pipe": FileSum(0, 0)})
    assert "pipe: not a regular file" in check_files(tmp_path)


def _seal(folder, files):
    (folder / MANIFEST).write_bytes(dump_manifest(Manifest({}, files)))
    assert read_manifest(folder).files == files


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"crc32": 1, "version": 99}', "[" * 100_000, "\xff"])
def test_a_broken_manifest_is_reported(folder, content):
    (folder / MANIFEST).write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"version": 1}', "damaged ('crc32' is missing)"),
        ("[1]", "damaged (a part has the wrong type)"),
        ('{"x', "is not JSON: "),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
    ],
)
def test_damage_is_reported_in_words(tmp_path, content, said):
    (tmp_path / "titan_manifest.json").write_text(content)
    with pytest.raises(CheckpointError) as error:
        read_manifest(tmp_path)
    assert said in error.value.message and "Error" not in error.value.message
