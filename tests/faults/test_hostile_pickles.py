"""A pickle that would run code, in every place of a checkpoint where one can hide, through every command (C11).

A child process runs the commands under an audit hook: nothing is executed, compiled, started, connected to or written
outside; a canary file stays absent. What needs the pickle is refused; what does not need it never opens it.
"""

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit.converters.evil import pickles, torch_zip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Where the pickle must be refused, and where it is next to what is read and is not opened
REFUSED, IGNORED = "refused", "ignored"


class Evil:
    """Writes `canary` when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return exec, (f"open({str(self.canary)!r}, 'w')",)


def hide(place: str, folder: Path, evil: bytes, canary: Path, sources: Path) -> str:
    """Make the checkpoint `folder` with the pickle `evil` in `place`; what must become of it."""
    kind, _, where = place.partition(" ")
    shutil.copytree(sources / kind, folder)
    if kind == "torch" or kind == "meta":
        (file,) = folder.glob("*.bin" if kind == "torch" else "*.pth")
        if where == "zip":
            file.write_bytes(torch_zip(evil))
        elif where == "legacy":
            file.write_bytes(evil if evil[:1] == b"\x80" else b"\x80\x02" + evil)
        elif where == "value":  # beside real weights, in one dict
            torch.save(torch.load(file) | {"note": Evil(canary)}, file)
        elif where == "nested zip":  # a second data.pkl in a folder of the archive
            with zipfile.ZipFile(file, "a") as archive:
                archive.writestr("x/data.pkl", evil)
        elif where == "stacked":  # a second pickle behind the first
            change_record(file, "data.pkl", lambda data: data + evil)
        elif where == "second shard":
            file.rename(folder / "pytorch_model-00001-of-00002.bin")
            (folder / "pytorch_model-00002-of-00002.bin").write_bytes(torch_zip(evil))
            names = [*torch.load(folder / "pytorch_model-00001-of-00002.bin")]
            files = {n: f"pytorch_model-0000{1 + (n == names[-1])}-of-00002.bin" for n in names}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
        else:
            raise AssertionError(place)
    elif kind == "dcp":
        metadata_file = folder / ".metadata"
        metadata = pickle.loads(metadata_file.read_bytes())
        if where == "metadata":
            metadata_file.write_bytes(evil)
        elif where == "rank metadata":
            metadata_file.rename(folder / "__0.metadata")
            (folder / "__1.metadata").write_bytes(evil)
        elif where == "planner_data":
            metadata.planner_data["norm.weight"] = ("norm.weight", Evil(canary))
            metadata_file.write_bytes(pickle.dumps(metadata))
        elif where == "storage_meta":
            metadata.storage_meta = Evil(canary)
            metadata_file.write_bytes(pickle.dumps(metadata))
        elif where == "tensor item":
            swap_item(folder, metadata, "norm.weight", torch_zip(evil))
        elif where == "value item":  # an entry that is no tensor: copied as bytes, shown by size, never decoded
            state = {name: torch.load(sources / "meta" / "consolidated.00.pth")[name] for name in metadata.planner_data}
            shutil.rmtree(folder)
            dcp.save(state | {"train_state": {"note": Evil(canary)}}, checkpoint_id=str(folder), no_dist=True)
            shutil.copy(sources / "dcp" / "config.json", folder)
            return IGNORED
        else:
            raise AssertionError(place)
    else:
        name = {"array": "vocab.npy"}.get(where, where)
        if where == "array":
            out = io.BytesIO()
            np.save(out, np.array([Evil(canary)], dtype=object), allow_pickle=True)
            (folder / name).write_bytes(out.getvalue())
        elif where == "header":
            text = json.dumps({"__metadata__": {"x": "y"}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
            file = folder / "model.safetensors"
            file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + evil[:4].ljust(4) + evil)
            return REFUSED
        elif where == "instead":
            (folder / "model.safetensors").write_bytes(evil)
            return REFUSED
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(evil if name.endswith(".pkl") else torch_zip(evil))
        return IGNORED
    return REFUSED


def change_record(file: Path, name: str, change) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in entries:
            archive.writestr(entry, change(data) if entry.endswith(name) else data)


def swap_item(folder: Path, metadata, fqn: str, item: bytes) -> None:
    (key,) = [key for key in metadata.storage_data if key.fqn == fqn]
    (folder / "__9_0.distcp").write_bytes(item)
    metadata.storage_data[key] = type(metadata.storage_data[key])("__9_0.distcp", 0, len(item))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


PLACES = (
    "torch zip", "torch legacy", "torch value", "torch nested zip", "torch stacked", "torch second shard",
    "meta zip", "meta legacy", "meta value", "meta stacked",
    "dcp metadata", "dcp rank metadata", "dcp planner_data", "dcp storage_meta", "dcp tensor item", "dcp value item",
    "hf_single header", "hf_single instead", "hf_single training_args.bin", "hf_single optimizer.pt",
    "hf_single scheduler.pt", "hf_single rng_state.pth", "hf_single tokenizer.pkl", "hf_single array",
    "hf_single runs/events.pkl",
)  # fmt: skip
SPELLED = ("torch zip", "dcp metadata")  # in the slow set, here in every spelling there is


def run(tmp_path: Path, folders: dict[str, Path], sources: Path) -> dict[str, list[dict]]:
    """All commands over all folders, in one child."""
    commands, untouched = [], []
    for number, folder in enumerate(folders.values()):
        out = tmp_path / "outputs" / str(number)
        commands += [
            ["inspect", str(folder)],
            ["verify", str(folder)],
            ["diff", str(folder), str(sources / "hf_single")],
            ["diff", str(sources / "hf_single"), str(folder)],
            ["convert", "auto", str(folder), f"{out}-made", "--to", "dcp"],
            ["reshard", str(folder), f"{out}-reshard"],
        ]
        untouched += [str(p) for p in folder.rglob("*") if p.suffix in (".pkl", ".npy", ".pt") or "_state" in p.name]
        untouched += [str(p) for p in folder.glob("training_args.bin")]
    (tmp_path / "outputs").mkdir()
    hostile = next(iter(folders.values()))
    task = {
        "allowed": [str(tmp_path / "outputs"), str(tmp_path / "log")],
        "untouched": untouched,
        "log": str(tmp_path / "log"),
        "commands": commands,
        "warm_up": [[*c[:1], *(x.replace(str(hostile), str(sources / "dcp")) for x in c[1:])] for c in commands[:6]],
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    child = Path(__file__).with_name("hostile_child.py")
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, child, tmp_path / "task.json"], capture_output=True, text=True, cwd=root, env=_env(root)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    each = len(results) // len(folders)
    return {name: results[i * each : (i + 1) * each] for i, name in enumerate(folders)}


def _env(root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(root)}


@pytest.mark.parametrize("spelled", [(), pytest.param(SPELLED, marks=pytest.mark.slow)])
def test_c11_no_pickle_is_run_wherever_it_hides(sources, tmp_path, spelled):
    canary = tmp_path / "canary"
    spellings = pickles(canary)
    folders, fates = {}, {}
    for place in PLACES:
        for spelling in spellings if place in spelled else ("reduce",):
            name = f"{place}, {spelling}"
            folders[name] = tmp_path / "hostile" / str(len(folders))
            fates[name] = hide(place, folders[name], spellings[spelling], canary, sources)
    assert not canary.exists()
    problems = []
    for name, results in run(tmp_path, folders, sources).items():
        for result in results:
            said, command = result["said"], " ".join(result["command"][:2])
            if result["seen"]:
                problems.append(f"{name}: {command} did {result['seen']}")
            if "Traceback" in said or result["code"] not in (0, 1, 2):
                problems.append(f"{name}: {command} ended with {result['code']}: {said[-300:]}")
            refused = result["code"] == 2 or (result["code"] == 1 and command.startswith("verify") and "FAILED" in said)
            if fates[name] == REFUSED and not refused and not _has_no_need(name, command):
                problems.append(f"{name}: {command} was not refused: {said[-300:]}")
            if (
                fates[name] == IGNORED
                and result["code"] != 0
                and command.split()[0] in ("inspect", "convert", "verify")
            ):
                problems.append(f"{name}: {command} stumbled: {said[-300:]}")
    assert problems == []
    assert not canary.exists()
    assert [p.name for p in (tmp_path / "outputs").iterdir() if ".tmp-" in p.name] == []


def _has_no_need(name: str, command: str) -> bool:
    """`inspect` lists a DCP checkpoint from its metadata: items are opened by who reads values."""
    return name.startswith("dcp tensor item") and command.startswith("inspect")


def test_the_canary_sings_when_a_pickle_is_run(tmp_path):
    """The other half of the proof: these pickles do run where somebody lets them."""
    sang = []
    for name, data in pickles(tmp_path / "canary").items():
        child = os.fork()
        if child == 0:
            file = io.BytesIO(data)
            with suppress(BaseException):
                while True:
                    pickle.load(file)
            os._exit(0)
        os.waitpid(child, 0)
        if (tmp_path / "canary").exists():
            (tmp_path / "canary").unlink()
            sang.append(name)
    assert sang == ["reduce", "reduce_protocol_4", "global", "inst", "obj", "nested", "stacked"]
