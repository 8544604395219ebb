"""Pickles from a checkpoint: plain values come through, everything else is refused and never run."""

import pickle
from pathlib import Path

import pytest
import torch

from converters.common.errors import CheckpointError, TitanError
from converters.containers.dcp_item import read_blob_item
from converters.containers.dcp_metadata import parse_metadata
from converters.containers.safe_pickle import PLAIN_STUBS, PlainDict, safe_load
from converters.containers.tensor_pickle import load_tensors
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from tests.unit.converters.evil import opened_by, pickles, torch_zip
from tests.unit.converters.samples import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EVIL = list(pickles(Path("/nowhere")))


@pytest.mark.parametrize("protocol", range(2, 5))
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        -1,
        1.5,
        "ü" * 300,
        b"\x00\xff" * 200,
        [1, [2]],
        (1, (2, ())),
        {"a": {1: None}},
        {1, 2},
        "x" * 70_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_come_through(protocol, value):
    assert safe_load(pickle.dumps(value, protocol=protocol), PLAIN_STUBS, what="a value") == value


def refused(action, canary: Path) -> str:
    with pytest.raises(TitanError) as caught:
        action()
    assert not canary.exists()
    return str(caught.value)


@pytest.mark.parametrize("kind", EVIL)
def test_malicious_pickles_are_refused_and_never_run(tmp_path, kind):
    canary = tmp_path / "canary"
    data = pickles(canary)[kind]

    def try_all():
        for load in (
            lambda: safe_load(data, PLAIN_STUBS, what="x"),
            lambda: parse_metadata(data),
            lambda: load_tensors(data, what="x"),
            lambda: read_blob_item(torch_zip(data)),
        ):
            refused(load, canary)

    assert opened_by(try_all) == []


@pytest.mark.parametrize("kind", EVIL)
def test_malicious_files_are_refused_wherever_the_pickle_hides(tmp_path, kind):
    canary = tmp_path / "canary"
    data = pickles(canary)[kind]
    (tmp_path / "zip.pt").write_bytes(torch_zip(data))
    (tmp_path / "legacy.pt").write_bytes(data)
    metadata = save_dcp(tmp_path / "metadata", {"w": torch.zeros(3)})
    (metadata / ".metadata").write_bytes(data)
    # Inside a good .metadata: the payload stands where the version belongs.
    hidden = save_dcp(tmp_path / "hidden", {"w": torch.zeros(3)})
    whole = (hidden / ".metadata").read_bytes()
    payload = data[2:] if data[:1] == b"\x80" else data
    head, tail = whole.split(b"\x8c\x051.0.0\x94")
    (hidden / ".metadata").write_bytes(head[:2] + head[11:] + payload[:-1] + tail)  # without the frame's length

    def try_all():
        for name in ("zip.pt", "legacy.pt", "metadata", "hidden"):
            refused(lambda name=name: open_checkpoint(tmp_path / name), canary)

    assert opened_by(try_all) == []


@pytest.mark.parametrize("kind", EVIL)
def test_malicious_items_are_refused(tmp_path, kind):
    canary = tmp_path / "canary"
    folder = save_dcp(tmp_path / "dcp", {"w": torch.zeros(3), "note": "x" * 2000})
    catalog = open_checkpoint(folder)
    chunk, blob = catalog.tensors["w"].chunks[0], catalog.items["note"]
    (data_file,) = folder.glob("*.distcp")
    evil = torch_zip(pickles(canary)[kind])
    content = bytearray(data_file.read_bytes())
    for offset, length in (chunk.item, (blob.byte_offset, blob.length)):
        assert len(evil) < length
        content[offset : offset + length] = b"\0" * (length - len(evil)) + evil
    data_file.write_bytes(content)

    def try_all():
        with CatalogReader(catalog) as reader:
            refused(lambda: reader.read("w", catalog.tensors["w"].chunks[0].box), canary)
            refused(lambda: read_blob_item(reader.read_blob("note")), canary)
            refused(lambda: read_blob_item(evil), canary)

    assert opened_by(try_all) == []


def test_the_message_names_what_was_asked_for():
    with pytest.raises(CheckpointError, match=r"file\.pt: refused, it asks for `posix\.system`"):
        safe_load(b"\x80\x02cposix\nsystem\n.", PLAIN_STUBS, what="file.pt")


def test_a_build_opcode_cannot_change_a_stand_in():
    # (None, {"poisoned": 1}) as slot state of the class itself
    data = b"\x80\x02ccollections\nOrderedDict\nN}X\x08\x00\x00\x00poisonedK\x01s\x86b."
    with pytest.raises(CheckpointError):
        safe_load(data, PLAIN_STUBS, what="x")
    assert not hasattr(PlainDict, "poisoned")


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_cut_pickle_is_an_error(cut):
    data = pickle.dumps({"key": ["value", 1.5, b"bytes", 2**40]}, protocol=4)
    with pytest.raises(CheckpointError):
        safe_load(data[:cut], PLAIN_STUBS, what="x")


def test_a_pickle_over_the_limit_is_not_even_looked_at():
    with pytest.raises(CheckpointError, match="more than the plausible 10"):
        safe_load(pickle.dumps("x" * 100), PLAIN_STUBS, what="x", max_bytes=10)


def test_an_endless_value_is_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="endless"):
        read_blob_item(torch_zip(pickle.dumps(endless, protocol=2)))
