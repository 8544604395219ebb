"""safetensors both ways: the library opens ours, we open the library's, and broken files say what is broken."""

import json
import struct

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, TitanError, UnsupportedError
from converters.containers.safetensors_write import plan_safetensors
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from tests.unit.converters.samples import infos, raw, read_all, state_dict, write


def sample() -> dict[str, torch.Tensor]:
    state = {fqn: tensor.contiguous() for fqn, tensor in state_dict().items()}
    return {fqn: tensor for fqn, tensor in state.items() if DTYPES[str(tensor.dtype)[6:]].safetensors}


def test_reads_what_the_library_saved(tmp_path):
    state = sample()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        catalog = open_checkpoint(path)
        assert read_all(catalog) == {fqn: raw(tensor) for fqn, tensor in state.items()}


@pytest.mark.parametrize("shard_bytes", [1 << 30, 700])
def test_the_library_opens_what_we_wrote(tmp_path, shard_bytes):
    state = sample()
    safetensors.torch.save_file(state, tmp_path / "source.safetensors")
    target = plan_safetensors(infos(state), shard_bytes=shard_bytes)
    with CatalogReader(open_checkpoint(tmp_path / "source.safetensors")) as reader:
        write(reader, target, tmp_path / "out")
    found = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        header = struct.unpack("<Q", file.read_bytes()[:8])[0]
        assert header % 8 == 0
    assert {f: (t.dtype, t.shape, raw(t)) for f, t in found.items()} == {
        f: (t.dtype, t.shape, raw(t)) for f, t in state.items()
    }
    for slot in target.slots:
        assert slot.byte_offset % DTYPES[slot.dtype].itemsize == 0
    assert read_all(open_checkpoint(tmp_path / "out")) == {f: raw(t) for f, t in state.items()}


def test_shards_are_named_and_indexed_as_transformers_does(tmp_path):
    state = {f"layer.{n}": torch.full((10,), float(n)) for n in range(5)}
    safetensors.torch.save_file(state, tmp_path / "source.safetensors")
    with CatalogReader(open_checkpoint(tmp_path / "source.safetensors")) as reader:
        write(reader, plan_safetensors(infos(state), shard_bytes=80), tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    assert len(safetensors.torch.load_file(tmp_path / "out/model-00001-of-00003.safetensors")) == 2


def test_a_tensor_larger_than_a_shard_has_one_of_its_own():
    target = plan_safetensors(infos({"large": torch.zeros(10), "small": torch.zeros(1)}), shard_bytes=8)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert [slot.file for slot in target.slots] == files
    assert list(target.file_bytes) == [*files, "model.safetensors.index.json"]


def test_types_that_safetensors_lacks_are_refused_together():
    tensors = infos({"a": torch.zeros(2, dtype=torch.complex128), "b": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(UnsupportedError, match=r"(?s)a: complex128.*b: complex128"):
        plan_safetensors(tensors)


def indexed(folder):
    safetensors.torch.save_file({"a": torch.zeros(2), "b": torch.ones(2)}, folder / "one.safetensors")
    safetensors.torch.save_file({"c": torch.zeros(3)}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


INDEX_FAULTS = {
    "missing file": ({"c": "three.safetensors"}, "three.safetensors: missing"),
    "wrong file": ({"b": "two.safetensors"}, "b: in one.safetensors, but the index says two.safetensors"),
    "unknown key": ({"d": "two.safetensors"}, "d: not in two.safetensors"),
    "escape": ({"c": "../two.safetensors"}, "may lie outside"),
    "device": ({"c": "/dev/zero"}, "may lie outside"),
    "number": ({"c": 5}, "may lie outside"),
}


@pytest.mark.parametrize("kind", INDEX_FAULTS)
def test_an_index_that_disagrees_is_reported(tmp_path, kind):
    changes, message = INDEX_FAULTS[kind]
    weight_map = indexed(tmp_path) | changes
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_keys_outside_the_index_and_in_two_files_are_reported_together(tmp_path):
    indexed(tmp_path)
    safetensors.torch.save_file(
        {"a": torch.zeros(2), "c": torch.zeros(3), "x": torch.zeros(1)}, tmp_path / "two.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"(?s)a: in both one.safetensors and two.safetensors.*x: .* not in the index"
    ):
        open_checkpoint(tmp_path)


def test_two_files_without_an_index_are_refused(tmp_path):
    indexed(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files and no model.safetensors.index.json"):
        open_checkpoint(tmp_path)


ONE_OF_SOME = [((1,), 3), ((3,), 3), ((0,), 2)]  # several torch files without an index are no checkpoint


@pytest.mark.parametrize(
    ("suffix", "numbers", "length"),
    [("safetensors", (1, 2), 3), *((suffix, *each) for suffix in ("safetensors", "bin") for each in ONE_OF_SOME)],
)
def test_files_that_are_missing_by_the_names_of_the_others_are_listed(tmp_path, suffix, numbers, length):
    for number in numbers:
        file = tmp_path / f"model-{number:05}-of-{length:05}.{suffix}"
        (torch.save if suffix == "bin" else safetensors.torch.save_file)({f"a{number}": torch.zeros(2)}, file)
    first = min(1, *numbers)
    missing = [f"model-{n:05}-of-{length:05}.{suffix}" for n in range(first, first + length) if n not in numbers]
    with pytest.raises(CheckpointError, match="(?s)files are missing.*" + ".*".join(missing)) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.message.count("\n") == len(missing)


def header(content, data=b"\0" * 8) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes) -> dict:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


HEADERS = {
    "cut": (header(entry(), b"\0" * 7), "bytes, but the header describes"),
    "trailing": (header(entry(), b"\0" * 9), "bytes, but the header describes"),
    "length beyond the end": (struct.pack("<Q", 1 << 40) + b"{}", "a header of 1,099,511,627,776 bytes"),
    "length 2**63": (struct.pack("<Q", 1 << 63) + b"{}", "a header of"),
    "length 0": (struct.pack("<Q", 0) + b"{}", "neither safetensors nor a torch file|not a JSON object"),
    "no JSON": (header(b"{nonsense"), "is not JSON"),
    "not UTF-8": (header(b'{"\xff": 1}'), "it is not UTF-8"),
    "a list": (header(b"[]"), "neither safetensors|not a JSON object"),
    "deep": (header(b'{"a":' * 100_000), "nested too deeply"),
    "twice": (header(b'{"w": {}, "w": {}}'), "repeated keys"),
    "hole": (header(entry(data_offsets=[4, 12]), b"\0" * 12), "a hole in front of w"),
    "overlap": (header({"a": entry()["w"], "b": entry()["w"]}), "an overlap in front of b"),
    "shape": (header(entry(shape=[3])), "8 bytes for shape [3]"),
    "negative": (header(entry(shape=[-1, -2])), "shape [-1, -2]"),
    "overflow": (header(entry(shape=[1 << 40, 1 << 40])), "8 bytes for shape"),
    "offsets swapped": (header(entry(data_offsets=[8, 0])), "-8 bytes"),
    "three offsets": (header(entry(data_offsets=[0, 4, 8])), "damaged safetensors header"),
    "fraction": (header(entry(shape=[2.0])), "shape [2.0]"),
    "no dtype": (header({"w": {"shape": [2], "data_offsets": [0, 8]}}), "w: not a dtype"),
    "no object": (header({"w": 5}), "w: not a dtype"),
    "unknown dtype": (header(entry(dtype="F4")), "element types that are not covered"),
    "empty": (b"", "is empty"),
    "short": (b"\x08\0\0", "neither safetensors|too few for safetensors"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "a web page, not weights"),
    "gzip": (b"\x1f\x8b\x08" + bytes(20), "gunzip"),
    "legacy pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "legacy torch file"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_broken_files_are_refused_with_their_name(tmp_path, kind):
    content, message = HEADERS[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(TitanError, match="model.safetensors") as caught:
            open_checkpoint(place)
        words = " ".join([caught.value.message, caught.value.hint, *caught.value.tries])
        assert any(part in words for part in message.split("|")), words
