"""The fault matrix of conversions (C8, C12–C15, C23, C24): names, archives, headers and tensors that nobody expects."""

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from converters.source.open import open_checkpoint
from tests.faults.conftest import DATA, INDEX, Q
from tests.unit.converters.samples import raw, read_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EVIL_NAMES = [
    "../secret.safetensors", "/dev/zero", "/etc/passwd", "~/x.safetensors", "~root", "a\0b", "C:\\x", "c:x", "sub/x",
    "..", ".", "", "\u2025/x", "x\u202e.safetensors", "x\n.safetensors", "\\\\server\\x", "file:///etc/passwd", 7, None,
    ["a"], {"a": 1},
]  # fmt: skip


def test_c8_names_that_lead_out_of_the_folder(index, refused, tmp_path, titan):
    folder, weight_map, write = index
    save_file({Q: torch.zeros(32, 32)}, tmp_path / "secret.safetensors")
    opened = []
    active = [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if active[0] and event == "open" else None)
    try:
        for name in EVIL_NAMES:
            write(weight_map | {Q: name})
            err = refused(folder, "may lie outside")
            assert "nothing" in err or "in one folder" in err
    finally:
        active[0] = False
    inside = (str(folder), "/proc", "/sys", sys.prefix, sys.base_prefix, os.getcwd())
    strange = [name for name in opened if name.startswith("/") and not name.startswith(inside)]
    assert [name for name in strange if "secret" in name or "passwd" in name or "/dev/zero" in name] == []
    # all of them at once are listed at once
    write(weight_map | dict(zip(weight_map, EVIL_NAMES[:6], strict=False)))
    refused(folder, "'../secret.safetensors'", "'/dev/zero'", "'~root'")


def test_c8_pipes_and_devices_in_place_of_files(index, refused):
    folder, weight_map, write = index
    os.mkfifo(folder / "pipe.safetensors")
    write(weight_map | {Q: "pipe.safetensors"})
    refused(folder, "pipe.safetensors: not a regular file")


def stored(entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return out.getvalue()


def entries_of(file) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


@pytest.mark.parametrize("kind", ["meta", "torch"])
@pytest.mark.parametrize("trick", ["deflated", "path", "absolute", "twice", "two directories", "in front", "overlap"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_c12_zips_that_are_no_plain_archives(copy_of, refused, kind, trick):
    source = copy_of(kind)
    (file,) = source.glob(DATA[kind])
    entries, data = entries_of(file), file.read_bytes()
    if trick == "deflated":
        data = stored(entries, zipfile.ZIP_DEFLATED)
    elif trick in ("path", "absolute"):
        data = stored([*entries, ("../x" if trick == "path" else "/etc/x", b"x")])
    elif trick == "twice":
        data = stored([*entries, entries[0]])
    elif trick == "two directories":
        data = data + stored(entries)
    elif trick == "in front":
        data = b"x" * 64 + data
    else:  # two entries of the directory on the same bytes
        data = bytearray(stored(entries))
        end = data.rindex(b"PK\x05\x06")
        start = struct.unpack_from("<I", data, end + 16)[0]
        second = data.index(b"PK\x01\x02", start + 4)
        data[second + 42 : second + 46] = data[start + 42 : start + 46]
    file.write_bytes(data)
    refused(source, str(file))


@pytest.mark.parametrize(
    ("bomb", "message"),
    [
        (lambda: torch.zeros(1).expand(1 << 20, 1 << 20), "overlap"),
        (lambda: torch.zeros(40).as_strided((32, 32), (1, 0)), "overlap"),
    ],
)
def test_c13_strides_that_overlap(copy_of, refused, bomb, message):
    for kind, name in (("torch", Q), ("dcp", "layers.0.attention.wq.weight")):
        source = copy_of(kind)
        if kind == "torch":
            state = torch.load(source / "pytorch_model.bin")
            torch.save(state | {name: bomb()}, source / "pytorch_model.bin")
        else:  # under another name, in an item of its own: dcp.save would have made it contiguous
            out = io.BytesIO()
            torch.save(bomb(), out)
            swap_item(source, name, out.getvalue())
        refused(source, message)


def test_c13_a_storage_that_is_too_small(copy_of, refused):
    source = copy_of("torch")
    file = source / "pytorch_model.bin"
    entries = [(name, data[:-4] if name.endswith("data/3") else data) for name, data in entries_of(file)]
    file.write_bytes(stored(entries))
    refused(source, "data/3 holds", "bytes instead of")


def swap_item(folder, fqn: str, item: bytes) -> None:
    """Replace the item of a one-chunk tensor of a stock checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (key,) = [key for key in metadata.storage_data if key.fqn == fqn]
    (folder / "__9_0.distcp").write_bytes(item)
    info = metadata.storage_data[key]
    metadata.storage_data[key] = type(info)("__9_0.distcp", 0, len(item))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


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
def test_c14_files_that_are_no_safetensors(copy_of, refused, titan, kind):
    content, message = HEADERS[kind]
    source = copy_of("hf_single")
    (source / "model.safetensors").write_bytes(content)
    for place in (source, source / "model.safetensors"):
        err = refused(place)
        assert any(part in err for part in message.split("|")) and "model.safetensors" in err, err
    code, out, err = titan("verify", source)
    assert code == (2 if kind in ("unknown dtype", "legacy pickle") else 1)  # 2: whole perhaps, but not covered


@pytest.mark.parametrize("name", [INDEX, "config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"[]", b"null", b'{"a":' * 100_000, b"{" * 1_000_000, b"\xff\xfe{}", b'{"a": 1, "a": 2}', b'{"a": NaN}',
     b'{"weight_map": [1]}', b'{"weight_map": {}}', b"1" * 10_000, b'{"hidden_size": 1e999}'],
)  # fmt: skip
def test_c15_json_that_is_none(copy_of, refused, name, content):
    source = copy_of("hf")
    (source / name).write_bytes(content)
    assert len(refused(source, name)) < 2000


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_c15_json_of_a_size_that_is_not_plausible(copy_of, refused, name):
    source = copy_of("hf")
    with (source / name).open("wb") as file:
        file.truncate(300 << 20)
    refused(source, name, "more than the plausible 268,435,456")


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_c15_a_byte_order_mark_is_no_fault(copy_of, titan, tmp_path, name):
    source = copy_of("hf")
    (source / name).write_bytes(b"\xef\xbb\xbf" + (source / name).read_bytes())
    assert titan("convert", "auto", source, tmp_path / "out", "--to", "dcp")[0] == 0


AWKWARD = {
    "transposed": torch.randn(6, 8).t(),
    "with_gaps": torch.randn(9, 8)[::2, 1:5],
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]),
    "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "wide": torch.tensor([2**63 - 1]),
    "unsigned": torch.tensor([2**16 - 1], dtype=torch.uint16),
}


@pytest.fixture
def training(sources, tmp_path):
    """A stock training checkpoint: the weights, and what the caller keeps in `train_state`."""

    def save(state):
        weights = torch.load(sources / "meta" / "consolidated.00.pth")
        dcp.save(weights | {"train_state": state}, checkpoint_id=str(tmp_path / "step-5"), no_dist=True)
        shutil.copy(sources / "dcp" / "config.json", tmp_path / "step-5")
        return tmp_path / "step-5"

    return save


def test_c23_awkward_tensors_come_through(titan, tmp_path, training):
    source = training(AWKWARD)
    torch.save(AWKWARD, tmp_path / "x.pt")
    found = read_all(open_checkpoint(source))
    expected = {name: raw(tensor) for name, tensor in AWKWARD.items()}
    assert {n.removeprefix("train_state."): v for n, v in found.items() if "train_state" in n} == expected
    assert read_all(open_checkpoint(tmp_path / "x.pt")) == expected
    for place in (source, tmp_path / "x.pt"):
        assert titan("inspect", place)[0] == titan("verify", place)[0] == titan("diff", place, place)[0] == 0
    assert titan("reshard", source, tmp_path / "out", "--for-mesh", "dp_shard=2,tp=2")[0] == 0
    assert titan("verify", tmp_path / "out")[0] == titan("diff", source, tmp_path / "out")[0] == 0
    assert read_all(open_checkpoint(tmp_path / "out")) == found


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.float8_e8m0fnu), torch.ones(2, dtype=torch.cfloat).conj()],
)
def test_c23_what_is_not_covered_is_refused(titan, tmp_path, tensor):
    torch.save({"w": torch.ones(2), "odd": tensor}, tmp_path / "x.pt")
    for command in (("inspect",), ("verify",), ("diff", tmp_path / "x.pt")):
        code, out, err = titan(*command, tmp_path / "x.pt")
        assert code in (1, 2) and "x.pt" in err + out


def test_c24_names(titan, tmp_path, training):
    """Long, in other letters, alike but for their case: all right."""
    names = ["n" * 300, "A", "a", "ß", "重み", "with space", "a.b", "a/b"]
    source = training({name: torch.full((2,), float(i)) for i, name in enumerate(names)})
    assert titan("reshard", source, tmp_path / "out")[0] == 0
    assert titan("diff", source, tmp_path / "out")[1].splitlines()[-1].startswith("equal; 29 tensors")
    code, out, _ = titan("inspect", tmp_path / "out", "--json")
    listed = {line["name"] for line in json.loads(out)["lines"]}
    assert code == 0 and listed >= {f"train_state.{name}" for name in names}
    loaded = {"train_state": {name: torch.zeros(2) for name in names}}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert [float(loaded["train_state"][name][0]) for name in names] == list(range(8))


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "a\nb", "\x1b[2J", "\u202eevil", ""])
def test_c24_names_that_cannot_be_shown_are_refused(titan, tmp_path, name):
    text = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(header(text))
    for command in (("inspect",), ("verify",), ("diff", tmp_path)):
        code, out, err = titan(*command, tmp_path)
        assert code in (1, 2) and "names that are empty or have unprintable characters" in out + err
        assert not name or name not in out + err  # not even in the message


def test_c24_a_file_name_that_is_no_utf_8(sources, tmp_path):
    """Beside the weights it is nothing to us; as the checkpoint's own name it must not break a message."""
    folder = os.fsencode(tmp_path) + b"/\xff-model"
    shutil.copytree(os.fsencode(sources / "hf_single"), folder)
    with open(folder + b"/\xfe.txt", "wb"):
        pass
    for command in ("inspect", "verify"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "titan_tools", command, folder],
            capture_output=True,
            text=True,
            errors="replace",
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
