"""Which tokenizer goes with the weights: the one that is named, else the data's; never a wrong one in silence."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from converters.common.errors import CheckpointError, ConfigError
from converters.families.rope import DynamicRope
from trainer.config.sections import Config, Model, Training
from trainer.data.prepare import prepare
from trainer.job.chosen_model import chosen_model, refuse_other_model
from trainer.job.job import resolve_job


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """Two prepared data folders with tokenizers of 270 and of 280 tokens."""
    folder = tmp_path_factory.mktemp("indexes")
    (folder / "text.txt").write_text("A text about nothing much at all, and then some more of it.\n" * 30)
    for size in (270, 280):
        prepare([folder / "text.txt"], folder / str(size), vocab_size=size, held_out=0.2)
    return folder


@pytest.fixture
def choose(indexes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def choose(hf_assets_path=None, *, data=None):
        named = {} if hf_assets_path is None else {"hf_assets_path": str(hf_assets_path)}
        training = Training(dataset="tokens", dataset_path=str(indexes / data) if data else None)
        return chosen_model(resolve_job(Config(model=Model(flavor="debug_gqa", **named), training=training)))

    return choose


def test_the_data_brings_its_tokenizer(choose, indexes):
    info = choose(data="270")
    assert info.assets["tokenizer.json"] == indexes / "270" / "tokenizer.json" and info.token_ids


def test_without_data_or_a_name_there_is_none(choose, tmp_path, indexes):
    assert choose().assets == choose(data="absent").assets == {}
    shutil.copytree(indexes / "270", tmp_path / "tests" / "assets" / "tokenizer")
    assert "tokenizer.json" in choose().assets  # the default folder


def test_a_folder_that_is_named_must_hold_one(choose, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "generation_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hf_assets_path = 'nowhere' is not a folder"):
        choose("nowhere", data="270")
    with pytest.raises(ConfigError, match=r"hf_assets_path = 'empty' holds no tokenizer\.json"):
        choose("empty", data="270")


def test_the_tokenizer_must_be_of_the_datas_size(choose, indexes, tmp_path):
    with pytest.raises(ConfigError, match=r"has 280 tokens, but training\.dataset_path = '.*270' was made with 270"):
        choose(indexes / "280", data="270")
    shutil.copytree(indexes / "270", tmp_path / "copy")
    assert choose("copy", data="270").assets["tokenizer.model"].parent.name == "copy"
    assert choose(indexes / "280").assets  # no data to compare with


def test_the_tokenizer_must_read_text_as_the_datas_does(choose, indexes, tmp_path):
    """One of the same size, from other text; and the same one without its tokenizer.model, which is no other."""
    (tmp_path / "other.txt").write_text("Straightforward words return; def straight(forward): return words.\n" * 30)
    prepare([tmp_path / "other.txt"], tmp_path / "other", vocab_size=270, held_out=0.2)
    with pytest.raises(ConfigError, match=r"has as many tokens as that of .*270', but tokenizes text differently"):
        choose(tmp_path / "other", data="270")
    shutil.copytree(indexes / "270", tmp_path / "hf", ignore=shutil.ignore_patterns("tokenizer.model"))
    assert choose(tmp_path / "hf", data="270").assets["tokenizer.json"].parent.name == "hf"


def test_the_length_that_dynamic_rope_is_trained_on_must_be_the_checkpoints(choose):
    """Beyond it the frequencies change; of every other RoPE it only says how far a model may look."""
    plain = choose()
    dynamic = replace(plain, args=replace(plain.args, rope_scaling=DynamicRope(factor=2.0)))
    for info in (plain, dynamic):
        refuse_other_model(info, info, Path("step-1"))
    refuse_other_model(replace(plain, args=replace(plain.args, max_seq_len=64)), plain, Path("step-1"))
    with pytest.raises(CheckpointError, match="max_seq_len: 64 in the checkpoint"):
        refuse_other_model(replace(dynamic, args=replace(dynamic.args, max_seq_len=64)), dynamic, Path("step-1"))
