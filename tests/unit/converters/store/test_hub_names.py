"""Names of models on the Hugging Face hub wherever a checkpoint is taken, from the hub's cache, without a network."""

import hashlib
import os
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from converters import api
from converters.common.errors import CheckpointError, ConfigError
from converters.store.commit import aside_of
from converters.store.hub_names import download_command, find_local
from titan_tools.api import load_for_inference
from trainer.checkpoints.problems import initial_path
from trainer.config.load import load_config
from trainer.job.chosen_model import tokenizer_folder

NAME, SHA, OTHER = "meta-llama/Tiny", "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch, hf):
    """The cache of a hub client that has downloaded one model, and a working folder beside it."""
    cache, here = tmp_path / "cache", tmp_path / "here"
    repository = cache / "models--meta-llama--Tiny"
    for folder in (repository / "blobs", repository / "refs", repository / "snapshots" / SHA, here):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(SHA)
    for file in hf.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        os.symlink(f"../../blobs/{blob.name}", repository / "snapshots" / SHA / file.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(here)
    return cache


@pytest.fixture
def snapshot(cache):
    return cache / "models--meta-llama--Tiny" / "snapshots" / SHA


def refused(name: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find_local(name)
    return caught.value


def test_a_name_is_the_snapshot_that_the_hubs_client_takes(snapshot):
    theirs = snapshot_download(NAME, local_files_only=True)
    assert find_local(NAME).path == snapshot == Path(theirs)
    assert find_local(f"{NAME}@main").path == find_local(f"{NAME}@{SHA}").path == snapshot


def test_what_exists_takes_precedence(snapshot):
    Path(NAME).mkdir(parents=True)
    assert find_local(NAME).path == Path(NAME)
    for path in ("Tiny", "./a/b/c", "/meta-llama/Tiny", "meta-llama/Tiny/model.safetensors", "a b/c", "../x/y"):
        assert find_local(path).path == Path(path), "no name of the hub"
    Path("meta-llama/Tiny").rename("meta-llama/Other")
    assert find_local("meta-llama/Othr").path == Path("meta-llama/Othr"), "a typing error in a local path"
    assert find_local(NAME).path == snapshot


def test_beside_a_local_folder_of_the_owner_the_download_is_named_too(titan, cache):
    Path("Qwen/Qwen3-8B").mkdir(parents=True)
    error = titan("inspect", "Qwen/Qwen3-4B").stderr
    assert error.splitlines()[1:] == ["try: Qwen/Qwen3-8B", "try: titan download Qwen/Qwen3-4B"]
    config = load_config("debug", ["--model.hf_assets_path", "Qwen/Qwen3-4B"])
    with pytest.raises(ConfigError) as caught:
        tokenizer_folder(config.model, config.training)
    assert caught.value.tries == ("titan download Qwen/Qwen3-4B --assets tokenizer",)


def test_an_interrupted_overwrite_of_a_local_folder_takes_precedence(cache):
    aside_of(Path(NAME)).mkdir(parents=True)
    assert find_local(NAME).path == Path(NAME)


def test_what_the_cache_lacks_names_the_command(cache):
    error = refused("Qwen/Qwen3-0.6B")
    assert str(cache) in error.message and error.tries == ("titan download Qwen/Qwen3-0.6B",)
    error = refused(f"{NAME}@{OTHER}")
    assert error.tries == (f"titan download {NAME} --revision {OTHER}", f"{NAME}@{SHA}")
    (cache / "models--meta-llama--Tiny" / "refs" / "main").unlink()
    assert refused(NAME).tries == (f"titan download {NAME}", f"{NAME}@{SHA}")
    assert download_command("a/b@v1", assets="tokenizer") == ["titan download a/b --revision v1 --assets tokenizer"]


def test_commands_take_a_name_and_say_the_snapshot_once(titan, snapshot):
    assert titan("convert", "hf-to-dcp", snapshot, "copy").returncode == 0
    assert titan("convert", "hf-to-dcp", snapshot, "bare").returncode == 0
    for name in ("titan_model.json", "assets/tokenizer.json", "titan_manifest.json"):
        Path("bare", name).unlink()
    Path("text.txt").write_text("some text " * 100)
    for words in (
        ("inspect", NAME),
        ("verify", NAME, "--quick"),
        ("diff", NAME, "copy"),
        ("convert", "auto", NAME, "out", "--to", "torch"),
        ("convert", "dcp-to-hf", "bare", "out-hf", "--model-from", NAME),
        ("convert", "dcp-to-hf", "copy", "dry", "--model-from", f"{NAME}@{SHA}", "--dry-run"),
        ("diff", "copy", "bare", "--model-from", NAME),
        ("data", "prepare", "text.txt", "--tokenizer", NAME, "--out", "data"),
        ("infer", NAME, "--prompt", "a", "--max-new-tokens", "1"),
        ("infer", "bare", "--model-from", NAME, "--prompt", "a", "--max-new-tokens", "1"),
    ):
        done = titan(*words)
        assert done.returncode == 0, done.stderr
        named = next(word for word in words if word.startswith(NAME))
        assert done.stderr.count(f"{named}: {snapshot}") == 1, words


def test_the_api_takes_names(snapshot, tmp_path):
    assert api.convert(NAME, tmp_path / "out", to="dcp", model_from=NAME).source == str(snapshot)
    assert api.diff(NAME, tmp_path / "out", model_from=NAME).equal and api.verify(f"{NAME}@main", quick=True).ok
    assert api.inspect(NAME).path == str(snapshot)
    with api.open_checkpoint(NAME, model_from=NAME) as weights:
        assert weights.info.family == "llama3"
    model = load_for_inference(NAME, model_from=NAME)
    assert model.generate("a", max_new_tokens=1).finish_reason == "length"
    with pytest.raises(CheckpointError, match="does not have this model"):
        api.reshard("x/y", tmp_path / "x", num_files=1)


def test_scales_come_from_a_named_model(titan, snapshot):
    done = titan("convert", "auto", NAME, "out", "--to", "hf", "--quantize", "fp8", "--scales-from", NAME)
    assert (done.returncode, "its weights are not quantized" in done.stderr) == (2, True)


def test_every_command_names_the_download(titan, cache):
    for words in (
        ("inspect", "x/y"),
        ("verify", "x/y"),
        ("diff", "here", "x/y"),
        ("reshard", "x/y", "out", "--num-files", "1"),
        ("convert", "auto", "x/y", "out", "--to", "hf"),
        ("convert", "auto", NAME, "out", "--to", "hf", "--model-from", "x/y"),
        ("convert", "auto", NAME, "out", "--to", "hf", "--quantize", "fp8", "--scales-from", "x/y"),
        ("data", "prepare", "text.txt", "--tokenizer", "x/y"),
        ("infer", "x/y", "--chat"),
    ):
        done = titan(*words)
        assert (done.returncode, "try: titan download x/y\n" in done.stderr) == (2, True), done.stderr


def test_a_snapshot_without_weights_names_the_download(titan, snapshot):
    (snapshot / "model.safetensors").unlink()
    done = titan("inspect", NAME)
    assert (done.returncode, done.stderr.splitlines()[-1].endswith(f"titan download {NAME}")) == (2, True), done.stderr


def test_configs_take_names(snapshot):
    config = load_config("debug", ["--checkpoint.initial_load_path", f"{NAME}@main", "--model.hf_assets_path", NAME])
    assert initial_path(config.checkpoint, config.model).path == snapshot
    assert tokenizer_folder(config.model, config.training) == snapshot
    config = load_config("debug", ["--checkpoint.initial_load_in_hf", "--model.hf_assets_path", NAME])
    assert initial_path(config.checkpoint, config.model).path == snapshot
    config = load_config("debug", ["--checkpoint.initial_load_path", "x/y", "--model.hf_assets_path", "x/y"])
    with pytest.raises(CheckpointError) as caught:
        initial_path(config.checkpoint, config.model)
    assert caught.value.tries == ("titan download x/y",)
    with pytest.raises(CheckpointError) as caught:
        tokenizer_folder(config.model, config.training)
    assert caught.value.tries == ("titan download x/y --assets tokenizer",)
