"""The output of a folder: bytes at given places of its files."""

import os

from converters.store.folder_output import FolderFiles


def test_a_write_in_parts_is_completed(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:3], offset))
    files = FolderFiles(tmp_path)
    files.create("file")
    files.write("file", 0, b"0123456789")
    files.write("file", 12, b"abcdefg")
    files.close()
    assert (tmp_path / "file").read_bytes() == b"0123456789\0\0abcdefg"
