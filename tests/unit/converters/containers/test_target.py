"""Bytes at given places of a file."""

import os

from converters.containers.target import write_at


def test_a_write_in_parts_is_completed(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:3], offset))
    write_at(tmp_path / "file", [(0, b"0123456789"), (12, b"abcdefg")])
    assert (tmp_path / "file").read_bytes() == b"0123456789\0\0abcdefg"
