"""Links in and around checkpoints (C9, C10): the user's own and the HF cache's are followed, a checkpoint's are not."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from converters.common.errors import CheckpointError
from converters.diff import diff
from converters.inspect import inspect_checkpoint
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.models.llama import write_meta
from titan_tools import cli

COMMIT = "c" * 40
_opened: list[str] | None = None


def _watch(event: str, arguments: tuple) -> None:
    if _opened is not None and event == "open":
        _opened.append(os.path.realpath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes) else "")


sys.addaudithook(_watch)


@pytest.fixture
def opened():
    """Real paths of all files that Python opens in the test."""
    global _opened
    _opened = []
    yield _opened
    _opened = None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model as a split HF folder, as DCP, and as a Meta release."""
    root = tmp_path_factory.mktemp("folders")
    model = write_llama(root / "hf", rope_scaling=None)
    model.save_pretrained(root / "hf", max_shard_size="40KB")
    (root / "hf" / "model.safetensors").unlink()
    write_meta(root / "meta", model)
    convert(root / "hf", root / "dcp", to="dcp")
    return root


@pytest.fixture
def titan(monkeypatch, capsys):
    """`titan("infer", …)` → exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["titan", *map(str, arguments)])
        return cli.run(), *capsys.readouterr()

    return run


def into_cache(hf: Path, cache: Path, *, shared: bool = False) -> Path:
    """`hf` as the hub's client keeps it; `shared`: in the store of all repositories."""
    repository = cache / "models--org--tiny"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in hf.iterdir():
        etag = hashlib.sha256(file.read_bytes()).hexdigest()
        if shared:
            store = cache / "blobs" / etag[:2] / etag
            store.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, store)
            (cache / "blobs" / ".huggingface-shared-blobs").write_text("1")
            if not (blobs / etag).is_symlink():
                (blobs / etag).symlink_to(os.path.relpath(store, blobs))
        else:
            shutil.copyfile(file, blobs / etag)
        (snapshot / file.name).symlink_to(f"../../blobs/{etag}")
    return repository


@pytest.mark.parametrize("given", ["repository", "snapshot"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_hf_cache_is_read_by_every_command(folders, tmp_path, titan, given, shared):
    repository = into_cache(folders / "hf", tmp_path / "hub", shared=shared)
    cached = repository if given == "repository" else repository / "snapshots" / COMMIT
    report = convert(cached, tmp_path / "dcp", to="dcp")
    assert "assets/tokenizer.json" in report.other_files
    assert diff(tmp_path / "dcp", folders / "dcp").equal
    assert diff(cached, folders / "hf").equal
    assert verify(cached).ok
    assert inspect_checkpoint(cached).model["family"] == "llama2"  # by its theta
    with open_native(cached) as weights:  # what training starts from (checkpoint.initial_load_path)
        assert weights.info.assets.keys() >= {"tokenizer.json"}
    said = [titan("infer", p, "--prompt", "def", "--max-new-tokens", "4", "--json") for p in (cached, folders / "hf")]
    assert said[0][0] == 0, said[0]
    assert json.loads(said[0][1])["results"] == json.loads(said[1][1])["results"]


def test_what_says_the_model_may_lie_in_the_cache(folders, tmp_path):
    repository = into_cache(folders / "hf", tmp_path / "hub")
    bare = shutil.copytree(folders / "dcp", tmp_path / "bare")
    for name in ("titan_model.json", "titan_manifest.json"):
        (bare / name).unlink()
    convert(bare, tmp_path / "hf", to="hf", model_from=repository)
    assert diff(tmp_path / "hf", folders / "hf").equal


def test_a_repository_of_several_snapshots_is_its_main_branch_or_reported(folders, tmp_path):
    repository = into_cache(folders / "hf", tmp_path / "hub")
    (repository / "snapshots" / ("d" * 40)).mkdir()
    assert open_checkpoint(repository).root.name == COMMIT
    (repository / "refs" / "main").unlink()
    with pytest.raises(CheckpointError, match="2 snapshots") as caught:
        open_checkpoint(repository)
    assert str(repository / "snapshots" / COMMIT) in caught.value.tries


PARTS = [
    ("hf", "model-00002-of-*.safetensors"),
    ("hf", "model.safetensors.index.json"),
    ("hf", "config.json"),
    ("hf", "tokenizer.json"),  # it would be copied into the output, and published with it
    ("hf", "generation_config.json"),
    ("dcp", "*.distcp"),
    ("dcp", ".metadata"),
    ("dcp", "titan_model.json"),
    ("dcp", "titan_manifest.json"),
    ("dcp", "assets/tokenizer.json"),
    ("dcp", "assets"),
    ("meta", "consolidated.00.pth"),
    ("meta", "params.json"),
]


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_a_part_that_is_a_link_to_elsewhere_is_refused_unopened(folders, tmp_path, opened, kind, part):
    checkpoint = shutil.copytree(folders / kind, tmp_path / "checkpoint")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (link,) = list(checkpoint.glob(part))[:1]
    shutil.move(link, secrets / link.name)  # the very file, so that nothing but the link is wrong
    link.symlink_to(secrets / link.name)
    to = "hf" if kind == "dcp" else "dcp"
    opened.clear()
    for use in (
        lambda: convert(checkpoint, tmp_path / "out", to=to),
        lambda: diff(checkpoint, folders / kind),
        lambda: open_native(checkpoint).__exit__(),
    ):
        with pytest.raises(CheckpointError, match="links to outside") as caught:
            use()
        assert str(secrets) in caught.value.message
        assert f"cp -rL {checkpoint} {checkpoint}-copy" in caught.value.tries
    assert not verify(checkpoint).ok
    assert [path for path in opened if path.startswith(str(secrets))] == []
    assert not (tmp_path / "out").exists()


def test_verify_opens_no_link_out_of_a_folder_that_is_broken_otherwise(folders, tmp_path, opened):
    checkpoint = shutil.copytree(folders / "dcp", tmp_path / "checkpoint")
    secret = shutil.move(checkpoint / "assets" / "tokenizer.json", tmp_path / "secret")
    (checkpoint / "assets" / "tokenizer.json").symlink_to(secret)
    (checkpoint / "titan_model.json").write_text("{")  # read before anything that lists the assets
    assert not verify(checkpoint).ok
    assert str(secret) not in opened


def test_all_links_are_listed_and_the_folder_of_the_files_is_named(folders, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in (folders / "hf").iterdir():
        (linked / file.name).symlink_to(file)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(linked)
    shards = sorted(p.name for p in (folders / "hf").glob("*.safetensors"))
    assert len(shards) > 1 and all(name in caught.value.message for name in shards)
    assert str(folders / "hf") in caught.value.tries
    assert open_checkpoint(folders / "hf").tensors


def test_a_snapshot_may_lead_to_its_own_blobs_and_nowhere_else(folders, tmp_path, opened):
    repository = into_cache(folders / "hf", tmp_path / "hub")
    shard = min((repository / "snapshots" / COMMIT).glob("*.safetensors"))
    blob = shard.resolve()
    other = tmp_path / "hub" / "models--org--other" / "blobs" / blob.name
    fake_store = tmp_path / "hub" / "blobs" / blob.name[:2] / blob.name  # without the marker of the real one
    for elsewhere in (other, fake_store, tmp_path / "blobs" / blob.name, repository / "refs" / blob.name):
        elsewhere.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(blob, elsewhere)
        shard.unlink()
        shard.symlink_to(elsewhere)
        opened.clear()
        with pytest.raises(CheckpointError, match="links to outside"):
            open_checkpoint(repository)
        assert str(elsewhere) not in opened
    shutil.move(repository / "blobs", tmp_path / "moved")  # the blobs folder itself as a link
    (repository / "blobs").symlink_to(tmp_path / "moved")
    shard.unlink()
    shard.symlink_to(f"../../blobs/{blob.name}")
    with pytest.raises(CheckpointError, match="links to outside"):
        open_checkpoint(repository)


def test_the_users_own_links_to_checkpoints_are_followed(folders, tmp_path, titan):
    for kind in ("hf", "dcp", "meta"):
        latest = tmp_path / f"latest-{kind}"
        latest.symlink_to(folders / kind)
        convert(latest, tmp_path / f"from-{kind}", to="meta" if kind == "dcp" else "dcp")
        assert verify(latest).ok
    (tmp_path / "disk").symlink_to(folders)  # a link further up
    assert diff(tmp_path / "disk" / "hf", folders / "hf").equal
    file = tmp_path / "weights.pth"
    file.symlink_to(folders / "meta" / "consolidated.00.pth")  # a file that the user names himself
    assert diff(file, folders / "meta").equal
    (tmp_path / "cache").symlink_to(into_cache(folders / "hf", tmp_path / "hub").parent)
    assert diff(tmp_path / "cache" / "models--org--tiny", folders / "hf").equal


def test_links_within_a_checkpoint_are_followed(folders, tmp_path):
    checkpoint = shutil.copytree(folders / "meta", tmp_path / "meta")
    (checkpoint / "original").mkdir()
    shutil.move(checkpoint / "params.json", checkpoint / "original" / "params.json")
    (checkpoint / "params.json").symlink_to("original/params.json")
    assert diff(checkpoint, folders / "meta").equal


def test_links_in_a_circle_and_to_nowhere(folders, tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "deeper"):
        with pytest.raises(CheckpointError, match=r"broken link|no such"):
            open_checkpoint(path)
    checkpoint = shutil.copytree(folders / "hf", tmp_path / "hf")
    shards = sorted(checkpoint.glob("*.safetensors"))[:2]
    for shard, other in (shards, shards[::-1]):
        shard.unlink()
        shard.symlink_to(other.name)
    with pytest.raises(CheckpointError, match="Too many levels") as caught:
        open_checkpoint(checkpoint)
    assert all(shard.name in caught.value.message for shard in shards)
    shards[0].unlink()
    shards[0].symlink_to("nothing.safetensors")
    with pytest.raises(CheckpointError, match="missing"):
        open_checkpoint(checkpoint)


def test_one_file_under_two_names(folders, tmp_path):
    """A hard link in place of a shard holds the other shard's tensors."""
    checkpoint = shutil.copytree(folders / "hf", tmp_path / "hf")
    first, second = sorted(checkpoint.glob("*.safetensors"))[:2]
    second.unlink()
    second.hardlink_to(first)
    with pytest.raises(CheckpointError, match=second.name):
        convert(checkpoint, tmp_path / "out", to="dcp")


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_is_the_input_by_another_name(folders, tmp_path, overwrite):
    source = shutil.copytree(folders / "dcp", tmp_path / "source")
    before = {p.name: p.read_bytes() for p in source.rglob("*") if p.is_file()}
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path)
    for made in ("source", "link", "up/source", "source/inside", "link/inside", "up/link/deep/inside", "."):
        for write in (reshard, lambda src, dst, **options: convert(src, dst, to="hf", **options)):
            with pytest.raises(CheckpointError, match="the source itself|one is inside the other|is a link"):
                write(source, tmp_path / made, overwrite=overwrite)
            with pytest.raises(CheckpointError, match="the source itself|one is inside the other|is a link"):
                write(tmp_path / "link", tmp_path / made, overwrite=overwrite)
    assert {p.name: p.read_bytes() for p in source.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "source", "up"]


def test_an_output_that_is_a_link_is_not_written_through(folders, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        convert(folders / "hf", tmp_path / "out", to="dcp", overwrite=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []
