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

from tests.faults.conftest import INDEX, Q

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


@pytest.fixture
def training(sources, tmp_path):
    """A stock training checkpoint: the weights, and what the caller keeps in `train_state`."""

    def save(state):
        weights = torch.load(sources / "meta" / "consolidated.00.pth")
        dcp.save(weights | {"train_state": state}, checkpoint_id=str(tmp_path / "step-5"), no_dist=True)
        shutil.copy(sources / "dcp" / "config.json", tmp_path / "step-5")
        return tmp_path / "step-5"

    return save


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
