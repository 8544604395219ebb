"""C18, C19: the disk is full before or during a conversion, or the source changes under it."""

import json
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest

import converters.store.commit as committing
from converters.common.errors import CheckpointError
from converters.common.names import JOURNAL
from converters.engine.copy import copy_tensors
from converters.verify import verify
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A Llama of 0.7 MB as transformers writes it, and as DCP."""
    folder = tmp_path_factory.mktemp("sources")
    write_llama(folder / "hf", hidden_size=64, intermediate_size=512, rope_scaling=None)
    convert(folder / "hf", folder / "dcp", to="dcp")
    return folder


@pytest.fixture
def small_files():
    """No file may grow beyond 200 kB: what a full disk does, without being root."""
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, old[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old)
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, old_handler)


WAYS = {
    "hf to dcp": lambda sources, dst, **options: convert(sources / "hf", dst, to="dcp", **options),
    "dcp to hf": lambda sources, dst, **options: convert(sources / "dcp", dst, to="hf", **options),
    "dcp to meta": lambda sources, dst, **options: convert(sources / "dcp", dst, to="meta", **options),
    "reshard": lambda sources, dst, **options: reshard(sources / "dcp", dst, **options),
}


@pytest.mark.parametrize("way", WAYS)
def test_c18_no_space_is_reported_before_anything_is_written(sources, tmp_path, monkeypatch, way):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(committing.shutil, "disk_usage", lambda path: usage._replace(free=300_000))
    with pytest.raises(CheckpointError, match=r"out: needs .* free on that disk"):
        WAYS[way](sources, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_c18_a_disk_that_fills_up_leaves_nothing(sources, tmp_path, small_files, way):
    with pytest.raises(CheckpointError, match="the file is too long") as caught:
        WAYS[way](sources, tmp_path / "out")
    assert "incomplete files are removed" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_c18_a_disk_that_fills_up_under_resume_keeps_what_is_written(sources, tmp_path, small_files):
    with pytest.raises(CheckpointError, match="the file is too long") as caught:
        WAYS["hf to dcp"](sources, tmp_path / "out", resume=True)
    assert "run again with --resume" in caught.value.hint
    (left,) = tmp_path.iterdir()
    assert (left / JOURNAL).is_file()
    small_files()
    WAYS["hf to dcp"](sources, tmp_path / "out", resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert verify(tmp_path / "out").ok
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.distcp")} == {
        p.name: p.read_bytes() for p in (sources / "dcp").glob("*.distcp")
    }


@pytest.mark.parametrize("way", WAYS)
def test_c18_all_is_on_the_disk_before_the_rename(sources, tmp_path, monkeypatch, way):
    """Files and folders are synced after their last write, the parent once the new name is in it."""
    events = []

    def noted(kind, call):
        def run(first, *arguments):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            events.append((kind, path))
            return call(first, *arguments)

        return run

    for name in ("pwrite", "fsync"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    monkeypatch.setattr(committing, "_renameat2", noted("rename", committing._renameat2))
    WAYS[way](sources, tmp_path / "out")
    (rename,) = (n for n, (kind, _) in enumerate(events) if kind == "rename")
    staging = events[rename][1]
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        made = str(Path(staging, path.relative_to(tmp_path / "out")))
        synced = events.index(
            ("fsync", made), max([n for n, e in enumerate(events) if e == ("pwrite", made)], default=0)
        )
        assert synced < rename, path
    assert ("fsync", str(tmp_path)) in events[rename:]


class Meddling:
    """A Progress that changes the source once some bytes have been copied."""

    def __init__(self, change):
        self.change = change

    def __call__(self, total_bytes, what):
        return self

    def __enter__(self):
        return self.advance

    def __exit__(self, *exc_info):
        return False

    def advance(self, num_bytes):
        if self.change:
            meddler = threading.Thread(target=self.change)
            meddler.start()
            meddler.join()
            self.change = None


def _append(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def _rewrite(file: Path) -> None:
    """The same size, other bytes."""
    with file.open("r+b") as opened:
        opened.seek(-1000, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-1000, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))


def _replace(file: Path) -> None:
    other = file.with_suffix(".other")
    other.write_bytes(file.read_bytes())
    os.replace(other, file)


@pytest.mark.parametrize("change", [_append, _rewrite, _replace, Path.unlink])
@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_c19_a_source_that_changes_while_it_is_read_gives_no_output(sources, tmp_path, change, to):
    kind, pattern = ("hf", "*.safetensors") if to == "dcp" else ("dcp", "*.distcp")
    shutil.copytree(sources / kind, tmp_path / "src")
    (file,) = (tmp_path / "src").glob(pattern)
    with pytest.raises(CheckpointError, match="changed while it was being read|its values are not those|ends at byte"):
        convert(tmp_path / "src", tmp_path / "out", to=to, progress=Meddling(lambda: change(file)))
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_c19_a_file_that_changes_before_its_turn_is_noticed_too(sources, tmp_path):
    """Of two files, the one that is read last: its header was read long before."""
    convert(sources / "dcp", tmp_path / "src", to="hf", options=_two_files())
    (tmp_path / "src/titan_manifest.json").unlink()
    last = sorted((tmp_path / "src").glob("*.safetensors"))[-1]
    with pytest.raises(CheckpointError, match=f"{last.name}: changed while it was being read"):
        convert(tmp_path / "src", tmp_path / "out", to="dcp", workers=1, progress=Meddling(lambda: _rewrite(last)))
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_c19_a_source_that_changed_since_the_kill_is_not_gone_on_from(sources, tmp_path, monkeypatch):
    shutil.copytree(sources / "hf", tmp_path / "src")

    def interrupted(*arguments, **options):
        copy_tensors(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("converters.conversion.execute.copy_tensors", interrupted)
        convert(tmp_path / "src", tmp_path / "out", to="dcp", resume=True)
    config = json.loads((tmp_path / "src/config.json").read_text())
    (tmp_path / "src/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    report = convert(tmp_path / "src", tmp_path / "out", to="dcp", resume=True)
    assert report.resumed_bytes == 0
    assert any("of another plan" in remark for remark in report.remarks)


def _two_files():
    from converters.formats.base import OutputOptions

    return OutputOptions(shard_bytes=400_000)
