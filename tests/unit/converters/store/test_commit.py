"""Commit: the place holds the old or the new, never half of either, and nothing is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import converters.store.commit as committing
from converters.common.errors import CheckpointError
from converters.containers.registry import replaceable
from converters.store.commit import (
    aside_of,
    check_destination,
    find_complete,
    new_staging,
    staged,
    sweep_staging,
)
from converters.store.location import locate
from converters.store.outputs import require_space

MARKS = replaceable()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def fill(dst: Path, text: str, marks=MARKS, **options) -> None:
    with staged(dst, marks=marks, **options) as folder:
        (folder / "assets").mkdir()
        (folder / "assets/file").write_text(text)
        (folder / ".metadata").write_text(text)


@pytest.fixture(params=["exchange", "aside"])
def kernel(request, monkeypatch):
    """With and without renameat2."""
    if request.param == "aside":
        monkeypatch.setattr(committing, "_renameat2", lambda *arguments: False)


def test_a_new_folder_appears_whole(tmp_path, kernel):
    with staged(tmp_path / "parent/out", marks=MARKS) as folder:
        (folder / "file").write_text("x")
        assert folder.parent == tmp_path / "parent"
        assert folder.name.startswith(".tmp-")
        assert not (tmp_path / "parent/out").exists()
    assert names(tmp_path / "parent") == ["out"]
    assert (tmp_path / "parent/out/file").read_text() == "x"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(error), staged(tmp_path / "out", marks=MARKS) as folder:
        (folder / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_an_existing_place_is_refused_before_any_work(tmp_path):
    fill(tmp_path / "out", "old")
    with pytest.raises(CheckpointError, match="exists already") as caught, staged(tmp_path / "out", marks=MARKS):
        pytest.fail("work was done")
    assert caught.value.tries == ("--overwrite",)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_folder_is_a_place_to_write_to(tmp_path, kernel, overwrite):
    (tmp_path / "out").mkdir(mode=0o700)
    fill(tmp_path / "out", "new", overwrite=overwrite)
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == [".metadata", "assets"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_an_empty_folder_that_somebody_fills_meanwhile_is_left_alone(tmp_path, kernel, monkeypatch):
    (tmp_path / "out").mkdir()
    rename = os.rename

    def late(source, target):
        (tmp_path / "out" / "theirs").touch()
        rename(source, target)

    monkeypatch.setattr(committing.os, "rename", late)
    with pytest.raises(CheckpointError, match="appeared while it was being made"):
        fill(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["theirs"]


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is the current folder"):
        check_destination(Path("."), overwrite=False, marks=MARKS)


def test_overwrite_replaces(tmp_path, kernel):
    fill(tmp_path / "out", "old")
    (tmp_path / "out/only_old").touch()
    fill(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [".metadata", "assets"]
    assert (tmp_path / "out/assets/file").read_text() == "new"


def test_an_old_copy_that_cannot_be_deleted_is_no_failure_of_the_new(tmp_path, kernel, monkeypatch):
    fill(tmp_path / "out", "old")

    def stubborn(path, **options):
        if "assets" in str(path):
            raise OSError("busy")
        return unlink(path, **options)

    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", stubborn)
    monkeypatch.setattr(os, "rmdir", stubborn)
    with staged(tmp_path / "out", overwrite=True, marks=MARKS) as folder:
        (folder / ".metadata").write_text("new")
    assert names(tmp_path / "out") == [".metadata"]
    assert len(names(tmp_path)) == 2  # and the rest of the old one


def test_a_failed_overwrite_keeps_the_old(tmp_path, kernel):
    fill(tmp_path / "out", "old")
    with pytest.raises(ValueError), staged(tmp_path / "out", overwrite=True, marks=MARKS) as folder:  # noqa: PT011
        (folder / "file").write_text("x")
        raise ValueError
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out/assets/file").read_text() == "old"


def test_overwrite_does_not_replace_somebodys_work(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is not what would be written"):
        fill(tmp_path / "home", "x", overwrite=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not what would be written"):
        fill(tmp_path / "project", "x", overwrite=True)
    (tmp_path / "project/model.safetensors").touch()
    (tmp_path / "project/.git").mkdir()
    with pytest.raises(CheckpointError, match="do not belong to a checkpoint.*\n  .git"):
        fill(tmp_path / "project", "x", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "project").iterdir()) == [".git", "config.json", "model.safetensors"]
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "empty", "x", overwrite=True)
    (tmp_path / "index").mkdir()
    (tmp_path / "index/index.json").touch()
    fill(tmp_path / "index", "x", overwrite=True, marks=("index.json",))


def test_links_and_files_are_refused(tmp_path):
    fill(tmp_path / "out", "old")
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file"):
        with pytest.raises(CheckpointError, match=name):
            check_destination(tmp_path / name, overwrite=True, marks=MARKS)


def test_a_place_that_appears_meanwhile_is_not_overwritten(tmp_path, kernel):
    with (
        pytest.raises(CheckpointError, match="exists already|appeared"),
        staged(tmp_path / "out", marks=MARKS) as folder,
    ):
        (folder / "file").write_text("mine")
        fill(tmp_path / "out", "theirs")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out/assets/file").read_text() == "theirs"


KILLED = """
import os, sys
from pathlib import Path
import converters.store.commit as committing
steps, at, exchange = [0], int(sys.argv[2]), sys.argv[3] == "exchange"
def dying(call):
    def run(*arguments, **options):
        steps[0] += 1
        if steps[0] == at:
            os.kill(os.getpid(), 9)
        return call(*arguments, **options)
    return run
if not exchange:
    committing._renameat2 = lambda *arguments: False
for name in ("rename", "fsync", "unlink", "rmdir", "open", "mkdir"):
    setattr(os, name, dying(getattr(os, name)))
if exchange:
    committing._renameat2 = dying(committing._renameat2)
out = Path(sys.argv[1])
with committing.staged(out, overwrite=True, marks=('.metadata',)) as folder:
    (folder / ".metadata").write_text("new")
    (folder / "file").write_text("new")
print("end")
"""


@pytest.mark.parametrize("how", ["exchange", "aside"])
def test_a_kill_at_any_step_leaves_one_complete_copy(tmp_path, how):
    outcomes = set()
    for step in range(1, 40):
        place = tmp_path / str(step)
        with staged(place / "out", marks=MARKS) as folder:
            (folder / ".metadata").write_text("old")
            (folder / "file").write_text("old")
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(place / "out"), str(step), how],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        found = find_complete(place / "out")
        content = {name: (found / name).read_text() for name in (".metadata", "file")}
        assert content in ({".metadata": "old", "file": "old"}, {".metadata": "new", "file": "new"})
        outcomes.add(content["file"])
        if done.returncode == 0:
            assert done.stdout == "end\n"
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        pytest.fail("it never came to an end")
    assert outcomes == {"old", "new"}


def test_the_renamed_copy_is_found(tmp_path):
    fill(tmp_path / "out", "old")
    os.rename(tmp_path / "out", aside_of(tmp_path / "out"))
    assert find_complete(tmp_path / "out") == aside_of(tmp_path / "out")
    fill(tmp_path / "out", "new", overwrite=True)
    assert find_complete(tmp_path / "out") == tmp_path / "out"


def test_what_killed_writers_left_is_swept(tmp_path):
    staging = new_staging(tmp_path / "step-5", "abc")
    assert new_staging(tmp_path / "step-5", "abc") == staging == tmp_path / ".tmp-abc"
    fill(tmp_path / "step-4", "kept")
    (tmp_path / ".tmp-a-file").touch()
    sweep_staging(tmp_path)
    assert names(tmp_path) == [".tmp-a-file", "step-4"]
    sweep_staging(tmp_path / "absent")


def test_space_is_asked_for_first(tmp_path):
    require_space(locate(tmp_path) / "not/there/yet", 1)
    with pytest.raises(CheckpointError, match="are free on that disk"):
        require_space(locate(tmp_path) / "not/there/yet", 1 << 60)


def test_room_is_reported_in_fitting_units(tmp_path, monkeypatch):
    usage = committing.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(committing.shutil, "disk_usage", lambda path: usage._replace(free=2048))
    with pytest.raises(CheckpointError, match=r"needs 1.5 MiB, 2.0 KiB are free on that disk"):
        require_space(locate(tmp_path) / "out", 1536 * 1024)


def test_a_file_holds_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is not a folder"):
        require_space(locate(tmp_path) / "file" / "out", 1)
