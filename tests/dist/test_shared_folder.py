"""Nodes that do not see the same checkpoint folder are found at the start; what they share is left as it was."""

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from converters.common.names import RUN_LOCK
from converters.store.folder_output import FolderOutput
from tests.dist import runs
from trainer.checkpoints import shared_folder


def run_on_nodes(config, folders, fault="") -> str:
    """Case: a run whose ranks are on nodes of their own, each with its own folder; the error it ends with, if any."""
    rank, create = dist.get_rank(), FolderOutput.create
    originals = shared_folder.PATIENCE_SECS, shared_folder.socket.gethostname
    shared_folder.PATIENCE_SECS = 0.3
    shared_folder.socket.gethostname = lambda: f"node-{rank}"

    def read_only(output, name):
        raise OSError(30, "Read-only file system")

    def lost(output, name):
        return nullcontext()

    if fault and rank:
        FolderOutput.create = {"read-only": read_only, "lost": lost}[fault]
    try:
        return runs.run(replace(config, job=replace(config.job, dump_folder=str(folders[rank]))))
    finally:
        shared_folder.PATIENCE_SECS, shared_folder.socket.gethostname = originals
        FolderOutput.create = create


def run_on_a_stale_mount(config) -> str:
    """Case: NFS answers ESTALE for a folder that was just made, once on each rank; the error of the run, if any."""
    whole, stale = os.stat, []

    def stat(path, *args, **keys):
        if Path(str(path)).parent.name.startswith(".tmp-") and not stale:
            stale.append(path)
            raise OSError(116, "Stale file handle")
        return whole(path, *args, **keys)

    os.stat = stat
    try:
        return runs.run(config) or ("" if stale else "nothing was asked")
    finally:
        os.stat = whole


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("place", ["relative", "absolute"])
def test_a_folder_that_is_not_shared_is_found_before_a_step(pools, data, tmp_path, place):
    folders = [tmp_path / "a", tmp_path / "b"]
    checkpoint = {} if place == "relative" else {"folder": str(tmp_path / "c")}
    if place == "absolute":  # the dump folders differ, but steps are written to one folder
        config = runs.make_config(data, tmp_path, steps=2, checkpoint=checkpoint, **runs.FSDP2)
        assert pools[2].run(run_on_nodes, config, folders) == ["", ""]
        assert not [name for name in files(tmp_path / "c") if ".tmp-" in name]
        assert (tmp_path / "c" / "step-2").is_dir()
        return
    config = runs.make_config(data, tmp_path, checkpoint=checkpoint, **runs.FSDP2)
    for output in pools[2].run(run_on_nodes, config, folders):
        assert output.startswith(f"CheckpointError: {tmp_path}/"), output
        assert "is not one folder that all nodes can write to" in output
        assert f"\n  node-1 (rank 1): {folders[1]}/checkpoint: does not see what rank 0 writes there | " in output
        assert "rank 0 is on node-0" in output
    assert files(folders[0]) == [f"checkpoint/{RUN_LOCK}"] and not folders[1].exists()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("read-only", "cannot read and write there: Read-only file system"),
        ("lost", "what it writes there does not reach rank 0"),
    ],
)
def test_a_node_that_cannot_write_is_found_before_a_step(pools, data, tmp_path, fault, told):
    config = runs.make_config(data, tmp_path, **runs.FSDP2)
    for output in pools[2].run(run_on_nodes, config, [tmp_path / "a"] * 2, fault):
        assert f"node-1 (rank 1): {tmp_path}/a/checkpoint: {told}" in output, output
    assert files(tmp_path / "a") == [f"checkpoint/{RUN_LOCK}"]


def test_a_step_that_a_node_does_not_see_is_not_resumed(pools, data, whole, tmp_path):
    """Nothing is written where a run only loads."""
    folders = [tmp_path / "a", tmp_path / "b"]
    runs.begin_from(folders[0], whole, 4)
    listed, changed = files(folders[0]), os.stat(folders[0] / "checkpoint").st_mtime_ns
    config = runs.make_config(data, tmp_path, steps=5, checkpoint={"load_only": True}, **runs.FSDP2)
    for output in pools[2].run(run_on_nodes, config, folders):
        assert f"{folders[0]}/checkpoint/step-4 is not seen by all nodes" in output or "step-4 is not seen" in output
        assert f"node-1 (rank 1): {folders[1]}/checkpoint/step-4: does not see it" in output
    assert pools[2].run(run_on_nodes, config, [folders[0]] * 2) == ["", ""]
    assert [name for name in files(folders[0]) if name.startswith("checkpoint/")] == listed
    assert os.stat(folders[0] / "checkpoint").st_mtime_ns == changed


def test_a_stale_handle_is_asked_again(pools, data, tmp_path):
    config = runs.make_config(data, tmp_path, steps=2, **runs.FSDP2)
    assert pools[2].run(run_on_a_stale_mount, config) == ["", ""]


def test_files_that_do_not_appear_share_one_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "PATIENCE_SECS", 0.5)
    (tmp_path / "3").touch()
    output = FolderOutput(tmp_path)
    started = time.monotonic()
    assert shared_folder._missing(output, range(8)) == [0, 1, 2, 4, 5, 6, 7]
    assert time.monotonic() - started < 3
