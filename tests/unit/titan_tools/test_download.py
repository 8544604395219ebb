"""`titan download` from a local stand-in for the hub: access, interruptions, resuming, checksums."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants, snapshot_download

from converters.common.errors import CheckpointError
from converters.source.open import open_checkpoint
from converters.verify import verify
from tests.unit.titan_tools.fake_hub import SHA, Hub
from titan_tools import api
from titan_tools.hub import download as module
from titan_tools.hub import fetch
from titan_tools.hub.download import FileSelection, download, select_default

NAME = "meta-llama/Tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    tensors = {"model.norm.weight": torch.arange(300_000, dtype=torch.float32)}
    files = {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        WEIGHTS: safetensors.torch.save(tensors),
        "tokenizer.json": b"{}",
        "README.md": b"# a model",
        "original/consolidated.00.pth": b"Meta's own",
    }
    with Hub(NAME, files, large={WEIGHTS, "original/consolidated.00.pth"}) as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "hf" / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "hf" / "stored_tokens"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(fetch, "PAUSES_SECS", (0.01, 0.01))
        yield hub


def environment(hub: Hub, home) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "PYTHONUNBUFFERED": "1"}


def titan(*arguments, hub: Hub, home, **env) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titan_tools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**environment(hub, home), **env})


def damage(kind: str, path: Path) -> None:
    """Damage a downloaded file, without a change of its name; of a link, the file that it leads to."""
    path = path.resolve()
    content = path.read_bytes()
    changed = {"flipped": bytes([*content[:-1], content[-1] ^ 1]), "cut": content[: len(content) // 2], "emptied": b""}
    path.write_bytes(changed[kind]) if kind in changed else path.unlink()


def outcome(folder: Path) -> str:
    """What `titan verify` says of the bytes of a downloaded folder's files."""
    return next(check.outcome for check in verify(folder).checks if check.name == "files")


def refused(*arguments, **options) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        download(*arguments, **options)
    return caught.value


def test_into_the_cache_in_the_layout_of_the_hubs_client(hub, tmp_path):
    done = titan("download", NAME, hub=hub, home=tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    snapshot = done.stdout.strip()
    assert snapshot == str(tmp_path / "hf/hub/models--meta-llama--Tiny/snapshots" / SHA)
    assert sorted(os.listdir(snapshot)) == ["config.json", WEIGHTS, "tokenizer.json"]
    assert open_checkpoint(snapshot).tensors["model.norm.weight"].shape == (300_000,)
    taken = ["*.json", "*.safetensors"]
    theirs = snapshot_download(NAME, local_files_only=True, cache_dir=tmp_path / "hf/hub", allow_patterns=taken)
    assert theirs == snapshot, "what titan puts there, the client finds under the branch's name"
    asked = len(hub.gets(WEIGHTS))
    again = titan("download", NAME, "--json", hub=hub, home=tmp_path / "hf")
    assert json.loads(again.stdout)["num_fetched_bytes"] == 0
    assert len(hub.gets(WEIGHTS)) == asked


def test_into_a_plain_folder(hub, tmp_path):
    report = download(NAME, tmp_path / "model", selection=FileSelection(original=True))
    held = {str(p.relative_to(tmp_path / "model")) for p in (tmp_path / "model").rglob("*") if p.is_file()}
    held = {name for name in held if not name.startswith(".cache/")}  # the checksums, as the hub's client keeps them
    assert held == {"config.json", WEIGHTS, "tokenizer.json", "original/consolidated.00.pth"}
    assert all((tmp_path / "model" / name).read_bytes() == hub.files[name] for name in held)
    assert report.num_fetched_bytes == sum(len(hub.files[name]) for name in held)
    assert os.listdir(tmp_path) == ["model"], "nothing is left next to it"
    shutil.rmtree(tmp_path / "model/.cache")  # then it may be anybody's
    assert "exists already" in refused(NAME, tmp_path / "model").message


def test_the_api_downloads_selected_files(hub, tmp_path):
    report = api.download(NAME, str(tmp_path / "model"), include=["*.json"], exclude=["*.index.json"])
    assert report.num_fetched_bytes == report.num_bytes
    assert sorted(os.listdir(tmp_path / "model")) == sorted([".cache", *(file.name for file in report.files)])
    assert all(file.name.endswith(".json") for file in report.files)


def test_selection_of_files():
    small = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "LICENSE"]
    split = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = [
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        "original/params.json",
        "README.md",
        "a.png",
        ".gitattributes",
    ]
    bins = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    assert select_default([*small, *split, *bins, *others, "consolidated.safetensors"]) == [*small, *split]
    assert select_default([*small, *bins, *others]) == [*small, *bins]
    assert select_default(["consolidated.safetensors", "params.json"]) == ["consolidated.safetensors", "params.json"]
    assert select_default(["consolidated.00.pth", "params.json", "x/y.bin"]) == ["consolidated.00.pth", "params.json"]
    meta_only = FileSelection(exclude=["*.safetensors", "*.index.json"], original=True).select(
        [*small, *split, *others]
    )
    assert meta_only == [*small, "original/consolidated.00.pth", "original/params.json"]
    assert FileSelection(include=["token*"], exclude=["*.model"]).select([*small, *split]) == ["tokenizer.json"]


def test_kinds_of_files():
    tokenizer = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "original/tokenizer.model"]
    weights = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    config = ["config.json", "generation_config.json"]
    names = [*tokenizer, *weights, *config, "consolidated.safetensors", "pytorch_model.bin", "original/params.json"]

    def selected(*assets, **others):
        return FileSelection(assets=assets, **others).select(names)

    assert sorted(selected("tokenizer")) == sorted([*tokenizer, "generation_config.json"])
    assert selected("config") == config and selected("index") == weights[1:] and selected("safetensors") == weights
    assert selected("config", "index", include=["*.bin"], exclude=["gen*"]) == [config[0], weights[1], names[-2]]


def test_tokenizer_alone_and_then_the_rest(hub, tmp_path, monkeypatch):
    for dst in (None, tmp_path / "model"):
        folder = Path(download(NAME, dst, selection=FileSelection(assets=["tokenizer"])).path)
        assert [name for name in sorted(os.listdir(folder)) if name != ".cache"] == ["tokenizer.json"]
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert download(NAME, dst, selection=FileSelection(assets=["tokenizer"])).path == str(folder)
        error = refused(NAME, dst)  # an incomplete model is not taken for a complete one
        assert "has no weights" in error.message and error.tries[0].startswith("HF_HUB_OFFLINE=0 titan download")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert (Path(download(NAME, dst).path) / WEIGHTS).is_file()


def test_a_kind_of_files_is_not_taken_for_the_folder(titan):
    done = titan("download", NAME, "--assets", "tokenizer", "index")  # as torchtitan's script would read it
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "try: --assets index")


def test_an_empty_selection_lists_the_files(hub):
    error = refused(NAME, selection=FileSelection(include=["*.gguf"]))
    assert "original/consolidated.00.pth" in error.message
    assert "--include" in error.hint


def test_dry_run_downloads_nothing(hub, tmp_path):
    report = download(NAME, tmp_path / "model", dry_run=True)
    assert report.num_bytes == report.num_fetched_bytes == sum(len(hub.files[f.name]) for f in report.files)
    assert hub.gets(WEIGHTS) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["cache", "folder"])
def test_an_interrupted_connection_resumes(hub, tmp_path, place):
    hub.cut_after[WEIGHTS] = 700_000
    report = download(NAME, tmp_path / "model" if place == "folder" else None)
    assert hub.gets(WEIGHTS) == [None, "bytes=700000-"]
    with open(os.path.join(report.path, WEIGHTS), "rb") as file:
        assert file.read() == hub.files[WEIGHTS]


@pytest.mark.parametrize("place", ["cache", "folder"])
def test_an_unreachable_hub_is_reported_and_the_next_run_resumes(hub, tmp_path, place):
    dst = tmp_path / "model" if place == "folder" else None
    hub.cut_after[WEIGHTS], hub.down_after_cut = 500_000, True
    error = refused(NAME, dst)
    assert "503" in error.message
    assert "run the same command again to resume" in error.hint
    assert not (tmp_path / "model").exists()
    hub.down, hub.asked = False, []
    report = download(NAME, dst)
    assert hub.gets(WEIGHTS) == ["bytes=500000-"]
    assert report.num_bytes - report.num_fetched_bytes >= 500_000
    with open(os.path.join(report.path, WEIGHTS), "rb") as file:
        assert file.read() == hub.files[WEIGHTS]


def test_unfinished_downloads_of_other_commits_are_reported(hub, tmp_path):
    left = tmp_path / f".download-model-{'a' * 12}"
    for folder in (left, tmp_path / f".download-model-2-{'a' * 12}"):
        folder.mkdir()
    assert download(NAME, tmp_path / "model").stale == (str(left),)
    done = titan("download", NAME, tmp_path / "model-3", hub=hub, home=tmp_path / "hf")
    assert str(left) not in done.stderr
    shutil.rmtree(tmp_path / "model")
    done = titan("download", NAME, tmp_path / "model", hub=hub, home=tmp_path / "hf")
    assert f"{left} is an unfinished download of another commit" in done.stderr


def test_a_killed_download_resumes_in_the_next_process(hub, tmp_path):
    hub.slow_after = {WEIGHTS: 1_000_000}
    command = [sys.executable, "-m", "titan_tools", "download", NAME, str(tmp_path / "model")]
    process = subprocess.Popen(command, env=environment(hub, tmp_path / "hf"), stderr=subprocess.DEVNULL)
    part = tmp_path / f".download-model-{SHA[:12]}" / f"{WEIGHTS}.incomplete"
    until = time.monotonic() + 30
    while not (part.is_file() and part.stat().st_size >= 1_000_000):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size
    assert 1_000_000 <= kept < len(hub.files[WEIGHTS])
    hub.slow_after, hub.asked = {}, []
    done = titan("download", NAME, tmp_path / "model", hub=hub, home=tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    assert hub.gets(WEIGHTS) == [f"bytes={kept}-"]
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_server_without_ranges_restarts_the_file(hub, tmp_path):
    hub.cut_after[WEIGHTS], hub.ignores_ranges = 700_000, True
    advanced = []

    class Watch:
        def __init__(self, total, what): ...
        def __enter__(self):
            return advanced.append

        def __exit__(self, *exc): ...

    report = download(NAME, tmp_path / "model", progress=Watch)
    assert hub.gets(WEIGHTS) == [None, "bytes=700000-"]
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert sum(advanced) == report.num_bytes


def test_large_files_come_from_another_host_that_does_not_get_the_token(hub, tmp_path):
    hub.cdn, hub.gated = True, True
    hub.cut_after[WEIGHTS] = 700_000
    download(NAME, tmp_path / "model", token=hub.good_token)
    assert [r for method, path, r in hub.asked if path == f"/cdn/{WEIGHTS}"] == [None, "bytes=700000-"]
    assert hub.cdn_was_told == []
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    download(NAME, token=hub.good_token)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])  # SHA-256, git's SHA-1
def test_a_wrong_checksum_is_detected_and_the_file_removed(hub, tmp_path, name):
    hub.tampers = {name}
    assert name in refused(NAME, tmp_path / "model").message
    assert not (tmp_path / "model").exists()
    hub.tampers = set()
    download(NAME, tmp_path / "model")
    assert (tmp_path / "model" / name).read_bytes() == hub.files[name]


def test_two_downloads_of_one_file_exclude_each_other(hub, tmp_path):
    part = tmp_path / f".download-model-{SHA[:12]}" / f"{WEIGHTS}.incomplete"
    part.parent.mkdir()
    with part.open("ab") as file:
        fetch._lock(file, part)
        assert "another process is downloading" in refused(NAME, tmp_path / "model").message
    download(NAME, tmp_path / "model")


def test_gated_repository_with_and_without_a_valid_token(hub, tmp_path, monkeypatch):
    hub.gated = True
    error = refused(NAME)
    assert "no token was sent" in error.message
    assert f"{hub.url}/{NAME}" in error.hint
    assert "hf auth login" in error.tries
    error = refused(NAME, token="hf_of_somebody_else")
    assert "the account of this token has none" in error.message
    assert "token is invalid" in refused(NAME, token="hf_bad").hint
    assert hub.gets(WEIGHTS) == [], "refused before a byte is downloaded"
    monkeypatch.setenv("HF_TOKEN", hub.good_token)
    download(NAME)
    monkeypatch.delenv("HF_TOKEN")
    with open(constants.HF_TOKEN_PATH, "w") as file:  # what `hf auth login` writes
        file.write(hub.good_token)
    download(NAME, tmp_path / "model")
    os.remove(constants.HF_TOKEN_PATH)
    download(NAME, tmp_path / "other", token=hub.good_token)


def test_a_socks_proxy_needs_a_package_and_the_error_says_so(hub, tmp_path):
    done = titan("download", NAME, hub=hub, home=tmp_path / "hf", ALL_PROXY="socks5://127.0.0.1:9", NO_PROXY="")
    assert done.returncode == 2 and "a SOCKS proxy needs the package socksio" in done.stderr


def test_the_command_line_reports_a_gated_repository(hub, tmp_path):
    hub.gated = True
    done = titan("download", NAME, hub=hub, home=tmp_path / "hf")
    assert (done.returncode, done.stdout) == (2, "")
    assert "access is granted by the owner" in done.stderr
    assert "Traceback" not in done.stderr
    done = titan("download", NAME, hub=hub, home=tmp_path / "hf", HF_TOKEN=hub.good_token)
    assert done.returncode == 0, done.stderr


def test_private_missing_and_misspelled_names(hub):
    hub.private = True
    assert "private: no token was sent" in refused(NAME).message
    hub.private = False
    assert "no such model" in refused("meta-llama/None").message
    assert "no branch, tag or commit 'v9'" in refused(NAME, revision="v9").message
    assert "owner/name" in refused("https://huggingface.co/meta-llama/Tiny").hint
    download(NAME, revision=SHA)


def test_no_network_and_offline_mode(hub, monkeypatch, tmp_path):
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace(hub.url, "http://127.0.0.1:9"))
    error = refused(NAME)
    assert "the connection failed" in error.message
    assert "HTTPS_PROXY" in error.hint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refused(NAME)
    assert "HF_HUB_OFFLINE" in error.message
    assert constants.HF_HUB_CACHE in error.hint


def test_a_full_disk_is_reported_before_and_during_a_download(hub, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "needs 1.1 MiB" in refused(NAME, tmp_path / "model").message
    assert hub.gets(WEIGHTS) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "_append", full)
    error = refused(NAME, tmp_path / "model")
    assert "No space left" in error.message
    assert "run the same command again" in error.hint


@pytest.mark.parametrize("place", ["cache", "folder"])
def test_files_that_only_the_hubs_client_can_download(hub, tmp_path, monkeypatch, place):
    monkeypatch.setattr(module, "MAX_HTTP_BYTES", 1_000_000)
    report = download(NAME, tmp_path / "model" if place == "folder" else None)
    with open(os.path.join(report.path, WEIGHTS), "rb") as file:
        assert file.read() == hub.files[WEIGHTS]
    hub.tampers = {WEIGHTS}
    damage("cut", Path(report.path, WEIGHTS))
    error = refused(NAME, tmp_path / "model" if place == "folder" else None)
    assert f"{WEIGHTS}: the downloaded file does not match the hub's checksum" in error.message
    hub.tampers = set()
    report = download(NAME, tmp_path / "model" if place == "folder" else None)
    assert Path(report.path, WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_file_names_outside_of_the_folder_are_refused(hub, tmp_path):
    hub.files["../evil.json"] = b"{}"
    error = refused(NAME, tmp_path / "model", selection=FileSelection(include=["*"]))
    assert "../evil.json" in error.message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("place", "kind"),
    [("cache", "flipped"), ("folder", "cut"), ("folder of the hub's client", "gone"), ("folder", "emptied")],
)
def test_what_is_damaged_is_found_and_downloaded_again(hub, tmp_path, place, kind):
    dst = None if place == "cache" else tmp_path / "model"
    folder = Path(snapshot_download(NAME, local_dir=dst) if "client" in place else download(NAME, dst).path)
    names = ["config.json", WEIGHTS]  # git's SHA-1, SHA-256
    hub.asked = []
    for name in names:
        damage(kind, folder / name)
    report = download(NAME, dst, dry_run=True)
    assert report.num_fetched_bytes == sum(len(hub.files[name]) for name in names)
    assert hub.gets(WEIGHTS) == [], "a dry run finds it and downloads nothing"
    report = download(NAME, dst)
    assert sorted(path.rpartition("/")[2] for method, path, _ in hub.asked if method == "GET" and SHA in path) == names
    assert hub.gets(WEIGHTS) == [None], "the file as a whole"
    assert report.damaged == (() if kind == "gone" and dst else tuple(names))
    for name in names:
        assert (folder / name).read_bytes() == hub.files[name]
        assert (folder / f"{name}.replaced").exists() == (dst is not None and kind != "gone"), (
            "a user may have edited it"
        )
    assert not list(tmp_path.glob(".download*"))
    assert download(NAME, dst).num_fetched_bytes == 0


def test_what_an_interrupted_download_left_is_compared_before_it_is_used(hub, tmp_path):
    hub.cut_after[WEIGHTS], hub.down_after_cut = 500_000, True
    refused(NAME, tmp_path / "model")
    staging = tmp_path / f".download-model-{SHA[:12]}"
    (staging / "config.json").write_bytes(hub.files["config.json"][:-1] + b"]")
    hub.down = False
    download(NAME, tmp_path / "model")
    assert (tmp_path / "model/config.json").read_bytes() == hub.files["config.json"]
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_link_of_the_cache_that_leads_to_another_file(hub):
    folder = Path(download(NAME).path)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(os.readlink(folder / "tokenizer.json"))
    assert download(NAME).damaged == ("config.json",)
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]
    assert (folder / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"], "the other file was intact"


def test_a_blob_in_the_store_that_all_repositories_share_is_mended(hub):
    """Its name there is another hash (Xet's), and the repository's blob is a link to it."""
    folder = Path(download(NAME).path)
    blob = (folder / WEIGHTS).resolve()
    shared = Path(constants.HF_HUB_CACHE) / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    (shared.parent.parent / ".huggingface-shared-blobs").touch()
    shared.write_bytes(blob.read_bytes())
    blob.unlink()
    blob.symlink_to(shared)
    assert download(NAME).num_fetched_bytes == 0
    assert outcome(folder) == "ok"
    damage("flipped", shared)
    assert outcome(folder) == "failed"
    assert download(NAME).damaged == (WEIGHTS,)
    assert not shared.exists() or shared.read_bytes() == hub.files[WEIGHTS]
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_folder_of_another_commit_is_refused(hub, tmp_path):
    download(NAME, tmp_path / "model")
    hub.files["config.json"] = b'{"architectures": ["Other"]}'
    error = refused(NAME, tmp_path / "model")
    assert "config.json" in error.message
    assert error.tries == (f"titan download {NAME} {tmp_path / 'model'} --revision {SHA}",)
    assert (tmp_path / "model/config.json").read_bytes() != hub.files["config.json"]


def test_checksums_of_mirrors_that_cannot_be_computed_are_reported(hub, monkeypatch):
    monkeypatch.setattr(hub, "etag", lambda name: f"W-{len(hub.files[name])}")
    assert set(download(NAME).unchecked) == {"config.json", WEIGHTS, "tokenizer.json"}


@pytest.mark.parametrize("kind", ["flipped", "gone"])
@pytest.mark.parametrize("place", ["cache", "folder"])
def test_offline_an_earlier_download_is_compared_with_its_own_checksums(hub, tmp_path, monkeypatch, place, kind):
    dst = None if place == "cache" else tmp_path / "model"
    folder = Path(download(NAME, dst).path)
    hub.down = True
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    report = download(NAME, dst)
    assert (report.path, report.num_fetched_bytes, report.num_bytes) == (str(folder), 0, 1_200_137)
    damage(kind, folder / WEIGHTS)
    error = refused(NAME, dst)
    assert WEIGHTS in error.message and "config.json" not in error.message
    hub.down = False
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    words = shlex.split(error.tries[0])
    assert words[:3] == ["HF_HUB_OFFLINE=0", "titan", "download"]
    download(words[3], Path(words[4]) if words[4:] else None)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_offline_a_cache_without_links_is_found(hub, monkeypatch):
    folder = Path(download(NAME).path)
    for link in folder.iterdir():  # as copied with `cp -rL`, or on a file system without links
        content = link.read_bytes()
        link.unlink()
        link.write_bytes(content)
    hub.down = True
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    report = download(NAME)
    assert (report.path, report.commit, report.num_bytes) == (str(folder), SHA, 1_200_137)
    assert sorted(report.unchecked) == ["config.json", WEIGHTS, "tokenizer.json"]
    (folder / WEIGHTS).unlink()
    assert "has no weights" in refused(NAME).message


def test_offline_a_shard_that_the_index_names_is_missed(hub, monkeypatch):
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": WEIGHTS, "b": "other"}}).encode()
    download(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "other: missing, and the index names it" in refused(NAME).message


@pytest.mark.parametrize(("place", "kind"), [("cache", "flipped"), ("folder", "cut"), ("folder", "gone")])
def test_verify_compares_with_the_hubs_checksums_and_the_hint_of_every_command_mends(hub, tmp_path, place, kind):
    dst = None if place == "cache" else tmp_path / "model"
    folder = Path(download(NAME, dst).path)
    assert outcome(folder) == "ok"
    damage(kind, folder / WEIGHTS)
    files = next(check for check in verify(folder).checks if check.name == "files")
    assert files.outcome == "failed" and files.problems[0].startswith(f"{WEIGHTS}: ")
    tried = [files.problems[-1]]
    if kind in ("cut", "emptied"):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(folder)
        tried += caught.value.tries
    for command in tried:
        words = [w for w in shlex.split(command) if not w.startswith("HF_HUB_CACHE=")]
        assert words[:2] == ["titan", "download"]
        damage("flipped", folder / "config.json")
        repository = words[2].replace("OWNER/NAME", NAME)
        report = download(repository, Path(words[3]) if words[3:] and words[3][0] != "-" else None, revision=SHA)
        assert report.path == str(folder)
        assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
        assert outcome(folder) == "ok"
