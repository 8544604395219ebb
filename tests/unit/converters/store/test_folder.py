"""The store of a folder, and the stores that are registered for URIs."""

import os

import pytest

from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.extensions import ExtensionError
from converters.store import base
from converters.store.base import open_store, read_bytes, register_store
from converters.store.location import Location, locate
from converters.store.open_files import OpenFiles


def test_reads_names_sizes_and_parts(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "x").write_bytes(b"0123456789")
    (tmp_path / "a").write_bytes(b"")
    store, file = open_store(locate(tmp_path))
    assert (file, str(store.location), store.local(["a"])) == ("", str(tmp_path), tmp_path)
    assert (store.names(), store.names("inner")) == (["a", "inner/"], ["x"])
    assert (store.size("inner/x"), read_bytes(store, "inner/x"), read_bytes(store, "inner/x", 3, 2)) == (
        10,
        b"0123456789",
        b"34",
    )
    with pytest.raises(CheckpointError, match=r"inner/x: the file ends at byte 10, in the middle of the data"):
        read_bytes(store, "inner/x", 8, 3)
    store.close()
    assert read_bytes(store, "inner/x", 0, 1) == b"0"
    store.close()


def test_a_file_is_found_in_the_store_of_its_folder(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"12")
    store, file = open_store(locate(tmp_path / "x.pt"))
    assert (store.location, file, store.size(file)) == (locate(tmp_path), "x.pt", 2)


def test_what_is_no_file_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    store, _ = open_store(locate(folder))
    for name, problem in {"link": "links to outside", "pipe": "not a regular file", "none": "missing"}.items():
        with pytest.raises(CheckpointError, match=problem):
            store.size(name)


def test_a_replaced_file_has_another_identity(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    store, _ = open_store(locate(tmp_path))
    before = store.identity("x")
    assert store.identity("x") == before
    (tmp_path / "y").write_bytes(b"new")
    os.utime(tmp_path / "y", ns=(0, 0))
    (tmp_path / "y").replace(tmp_path / "x")
    assert store.identity("x") != before
    (tmp_path / "x").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        store.identity("x")


def test_a_scheme_is_opened_by_what_was_registered_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_OPENERS", {})
    with pytest.raises(UnsupportedError, match="s3://b/x: s3:// cannot be read"):
        open_store(locate("s3://b/x"))
    register_store("s3", lambda location: (open_store(locate(tmp_path))[0], location.name))
    assert open_store(Location("s3://b/x"))[1] == "x"
    with pytest.raises(UnsupportedError) as caught:
        open_store(Location("gs://b/x"))
    assert caught.value.hint == "known: paths, s3://"
    with pytest.raises(ExtensionError, match="the opener of gs://"):
        register_store("gs", lambda: None)


def test_closing_leaves_what_another_reader_uses(tmp_path):
    (tmp_path / "x").write_bytes(b"0123")
    files = OpenFiles(tmp_path)
    with files.use("x") as descriptor:
        files.close()
        assert os.pread(descriptor, 2, 1) == b"12"
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
