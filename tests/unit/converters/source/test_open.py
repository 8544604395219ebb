"""Opening: the content decides, and everything that is not a checkpoint says what it is instead."""

import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from converters.common.errors import CheckpointError, TitanError
from converters.source.open import open_checkpoint
from converters.store.folder_output import FolderOutput
from converters.store.manifest import TensorSum
from converters.store.output import write_manifest
from tests.unit.converters.samples import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STRANGERS = {
    "empty": (b"", "is empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    "html": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "a web page"),
    "html in capitals": (b"<HTML><HEAD><TITLE>502</TITLE>", "a web page"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"\0" * 40, "compressed with gzip"),
    "text": (b"just some text, nothing more", "neither safetensors nor a torch file"),
}


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.00.pth", "pytorch_model.bin"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_strangers_are_recognised(tmp_path, kind, name, as_folder):
    content, message = STRANGERS[kind]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(TitanError, match=name) as caught:
        open_checkpoint(tmp_path if as_folder else tmp_path / name)
    if kind != "text":
        assert message in str(caught.value)


def test_all_strangers_are_listed(tmp_path):
    """A repository cloned without Git LFS: each shard is a pointer."""
    for n in (1, 2, 3):
        (tmp_path / f"model-0000{n}-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="3 files hold something else than weights") as caught:
        open_checkpoint(tmp_path)
    assert all(f"0000{n}-of-00003.safetensors: a Git LFS pointer" in caught.value.message for n in (1, 2, 3))
    assert caught.value.tries == ("git lfs pull",)


def test_places_that_hold_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="the folder is empty"):
        open_checkpoint(tmp_path / "folder")
    (tmp_path / "folder/notes.txt").touch()
    with pytest.raises(CheckpointError, match="not a checkpoint; it holds notes.txt"):
        open_checkpoint(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")


def test_a_folder_of_runs_names_them(tmp_path):
    for run in ("first", "second"):
        (tmp_path / run / "checkpoint/step-10").mkdir(parents=True)
        (tmp_path / run / "checkpoint/step-10/.metadata").touch()
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError, match="a folder of runs, not a checkpoint") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.tries == (str(tmp_path / "first"), str(tmp_path / "second"))


def test_places_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path / ("x" * 300))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="loop"):
        open_checkpoint(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint("nul\0byte")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_part_of_a_checkpoint_names_the_whole(tmp_path, name):
    folder = save_dcp(tmp_path / "dcp", {"w": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="a part of a checkpoint") as caught:
        open_checkpoint(folder / name)
    assert caught.value.tries == (str(folder),)


def test_a_metadata_that_is_something_else(tmp_path):
    folder = save_dcp(tmp_path / "dcp", {"w": torch.zeros(3)})
    (folder / ".metadata").write_bytes(STRANGERS["lfs"][0])
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        open_checkpoint(folder)


def test_pipes_and_devices_inside_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="links to outside"):
        open_checkpoint(tmp_path / "dcp")


def test_a_half_written_dcp(tmp_path):
    folder = save_dcp(tmp_path / "dcp", {"w": torch.zeros(3)})
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="DCP data without .metadata"):
        open_checkpoint(folder)
    (folder / "__0.metadata").write_bytes(metadata)
    assert list(open_checkpoint(folder).tensors) == ["w"]  # one rank that saved for itself
    (folder / "__0.metadata").unlink()
    for content in (b"", metadata[: len(metadata) // 2], b"x" * 100):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=".metadata"):
            open_checkpoint(folder)
    (folder / ".metadata").write_bytes(metadata)
    (data,) = folder.glob("*.distcp")
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(folder)
    data.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_checkpoint(folder)


def test_two_checkpoints_in_one_folder_are_refused(tmp_path):
    folder = save_dcp(tmp_path / "dcp", {"w": torch.zeros(3)})
    safetensors.torch.save_file({"w": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="more than one checkpoint"):
        open_checkpoint(folder)


def test_the_manifest_must_agree(tmp_path):
    safetensors.torch.save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    write_manifest(FolderOutput(tmp_path), tensors={"w": TensorSum("float32", (3,), "")})
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]
    safetensors.torch.save_file({"v": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"changed or .*\n  v: float32 \[3\] in the files, missing in .*\n  w: missing"
    ):
        open_checkpoint(tmp_path)
    safetensors.torch.save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="instead of"):
        open_checkpoint(tmp_path)


def test_the_old_copy_is_opened_where_a_kill_left_it_aside(tmp_path):
    folder = tmp_path / "out"
    save_dcp(folder, {"w": torch.zeros(3)})
    folder.rename(tmp_path / ".old-out")
    assert open_checkpoint(folder).root == tmp_path / ".old-out"


def test_a_checkpoint_without_tensors_is_refused(tmp_path):
    safetensors.torch.save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="without a single tensor"):
        open_checkpoint(tmp_path)


def test_nothing_here_needs_torch(tmp_path):
    folder = save_dcp(tmp_path / "dcp", {"w": torch.ones(2, 3).bfloat16(), "n": 1})
    script = (
        "import sys\n"
        "from converters.engine.read import CatalogReader\n"
        "from converters.source.open import open_checkpoint\n"
        "import converters.engine.copy, converters.containers.dcp_write, converters.containers.safetensors_write\n"
        "from converters.views.catalog import Box\n"
        f"reader = CatalogReader(open_checkpoint({str(folder)!r}))\n"
        "assert reader.read('w', Box.whole((2, 3))).astype('float32').sum() == 6\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": path})


def test_files_of_a_series_without_an_index_are_no_advice(tmp_path):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in names:
        safetensors.torch.save_file({name: torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="2 safetensors files and no") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.tries == ()


def test_a_runs_folder_names_its_newest_complete_step(tmp_path):
    for folder, step in (("checkpoint", 9), ("checkpoint", 10), ("parts", 2)):
        save_dcp(tmp_path / "run" / folder / f"step-{step}", {"w": torch.zeros(3)})
    (tmp_path / "run" / "checkpoint" / "step-11").mkdir()  # cut off
    (tmp_path / "run" / "metrics.jsonl").touch()
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoint"):
        with pytest.raises(CheckpointError, match="not a checkpoint") as caught:
            open_checkpoint(place)
        assert caught.value.tries == (str(tmp_path / "run" / "checkpoint" / "step-10"),)
    (tmp_path / "cut" / "step-3").mkdir(parents=True)
    (tmp_path / "cut" / "old-step-99-bak").mkdir()
    with pytest.raises(CheckpointError, match="a folder of checkpoints") as caught:
        open_checkpoint(tmp_path / "cut")
    assert caught.value.tries == () and caught.value.hint == "none of its steps is complete"
