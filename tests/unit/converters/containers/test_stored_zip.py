"""Zips: what torch.save and we write is read, and every trick that a zip can play is refused."""

import io
import random
import struct
import zipfile
from zlib import crc32

import pytest
import torch

from converters.common.errors import CheckpointError
from converters.containers.stored_zip import ZipEntry, read_zip, small_entry, zip_pieces


def parse(data: bytes):
    return read_zip(lambda offset, length: data[offset : offset + length], len(data), what="it")


def small_zip(**options) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as archive:
        archive.writestr("archive/data.pkl", b"N." * 50)
        archive.writestr("archive/data/0", b"\0" * 1000)
    return out.getvalue()


def test_reads_what_torch_wrote():
    out = io.BytesIO()
    torch.save({"a": torch.arange(10), "b": torch.zeros(0)}, out)
    data = out.getvalue()
    records = parse(data)
    with zipfile.ZipFile(out) as archive:
        assert sorted(records) == sorted(archive.namelist())
        for name, record in records.items():
            assert data[record.data_offset :][: record.size] == archive.read(name)
            assert record.crc32 == archive.getinfo(name).CRC


def shell(name: str, size: int, crc: int, *, streamed: bool) -> tuple[bytes, bytes]:
    """Head and tail of a zip; if `streamed`, the CRC32 is unknown until the head was taken."""
    known: list[int] = [] if streamed else [crc]
    entries = [small_entry("archive/data.pkl", b"N."), ZipEntry(name, size)]
    pieces = zip_pieces(entries, known.__getitem__, streamed=streamed)
    _, head = next(pieces)
    known[:] = [crc]
    ((offset, tail),) = pieces
    assert offset == len(head) + size
    return head, tail


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [0, 1, 63, 1000])
@pytest.mark.parametrize("name", ["archive/data/0", "archive/data/" + "x" * 50])
def test_python_reads_what_we_built(size, name, streamed):
    payload = random.Random(size).randbytes(size)
    head, tail = shell(name, size, crc32(payload), streamed=streamed)
    assert len(head) % 64 == 0
    data = head + payload + tail
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read(name) == payload
    record = parse(data)[name]
    assert (record.data_offset, record.crc32) == (len(head), crc32(payload))


@pytest.mark.parametrize("streamed", [False, True])
def test_zip64_sizes(tmp_path, streamed):
    size = (1 << 32) + 5
    head, tail = shell("archive/data/0", size, 0, streamed=streamed)
    path = tmp_path / "sparse.zip"
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + size)
        file.write(tail)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == size
    with path.open("rb") as file:

        def read_at(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        record = read_zip(read_at, path.stat().st_size, what="it")["archive/data/0"]
    assert (record.data_offset, record.size) == (len(head), size)


def with_entry(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, b"x")
    return out.getvalue()


def overlapping() -> bytes:
    """Both directory entries point at the first local header."""
    data = bytearray(with_entry("archive/a") * 1)
    directory = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    entry = bytes(data[directory:end])
    second = bytearray(data[:directory]) + entry + entry.replace(b"archive/a", b"archive/b")
    return bytes(second) + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, 2 * len(entry), directory, 0)


BAD = {
    "deflated": lambda: small_zip(compression=zipfile.ZIP_DEFLATED),
    "concatenated": lambda: small_zip() + small_zip(),
    "prefixed": lambda: b"#!/bin/sh\n" + small_zip(),
    "trailing bytes": lambda: small_zip() + b"\0",
    "parent": lambda: with_entry("../x"),
    "absolute": lambda: with_entry("/etc/x"),
    "backslash": lambda: with_entry("a\\..\\x"),
    "overlap": overlapping,
    "empty": lambda: b"",
    "text": lambda: b"x" * 100,
    "truncated": lambda: small_zip()[:-300],
}


@pytest.mark.parametrize("kind", BAD)
def test_tricks_are_refused(kind):
    with pytest.raises(CheckpointError, match="^it: "):
        parse(BAD[kind]())


def test_duplicate_names_are_refused():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a", b"2")
    with pytest.raises(CheckpointError, match="twice"):
        parse(out.getvalue())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_flipped_bit_in_our_shell_is_an_error_or_changes_nothing_that_is_read(streamed):
    payload = b"\x07" * 100
    head, tail = shell("archive/data/0", 100, crc32(payload), streamed=streamed)
    data = head + payload + tail
    good = parse(data)
    for position in [*range(len(head)), *range(len(head) + 100, len(data))]:
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        try:
            found = parse(bytes(broken))
        except CheckpointError:
            continue
        assert found == good, f"byte {position}"


def test_data_that_a_damaged_header_moves_is_found_in_torchs_files():
    """By as many bytes as the data descriptor has, which would hide it."""
    out = io.BytesIO()
    torch.save(torch.arange(100), out)
    data = bytearray(out.getvalue())
    with zipfile.ZipFile(out) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data/0"))
        header = archive.getinfo(name).header_offset
    data[header + 28] ^= 16  # the length of its extra field
    with pytest.raises(CheckpointError, match="data descriptor disagree"):
        parse(bytes(data))
