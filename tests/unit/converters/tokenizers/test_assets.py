"""assets.py and tiktoken_model.py: the written tokenizer.json gives the ids of tiktoken, in transformers."""

import base64
import json
import os
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig

from converters.common.errors import CheckpointError
from converters.tokenizers.assets import (
    find_assets,
    read_token_ids,
    tokenizer_remark,
    write_assets,
    write_tokenizer_for_hf,
)
from converters.tokenizers.tiktoken_model import LLAMA3_PATTERN, looks_like_tiktoken, read_ranks, special_tokens_after

THIS_FILE = Path(__file__).read_text(encoding="utf-8")
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?",
    "def read(path):\n    return open(path).read()  # ünïcode → 漢字 🙂\n\n\n\tend   ",
    "",
    "   leading and trailing   \r\n",
    "<|begin_of_text|>in the text",
]


@pytest.fixture(scope="module")
def meta_tokenizer(tmp_path_factory):
    """A tokenizer.model as Meta ships it, its ranks trained on this very file."""
    folder = tmp_path_factory.mktemp("meta")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([THIS_FILE, *TEXTS], trainer)
    letters = {c: b for b, c in _gpt2_letters().items()}
    ranked = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    lines = [f"{base64.b64encode(bytes(letters[c] for c in token)).decode()} {rank}" for token, rank in ranked]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    return folder


def _gpt2_letters():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


@pytest.fixture
def ours(meta_tokenizer, tmp_path):
    written = write_tokenizer_for_hf(tmp_path, find_assets(meta_tokenizer), vocab_size=700, max_seq_len=128)
    assert written == ["tokenizer.json", "tokenizer_config.json"]
    return tmp_path


@pytest.fixture
def theirs(meta_tokenizer, monkeypatch):
    monkeypatch.setitem(os.environ, "TIKTOKEN_CACHE_DIR", "")
    ranks = read_ranks(meta_tokenizer / "tokenizer.model")
    special = {token: len(ranks) + i for i, token in enumerate(special_tokens_after(len(ranks), vocab_size=700))}
    return tiktoken.Encoding("test", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("text", [*TEXTS, THIS_FILE])
def test_transformers_gives_tiktoken_s_ids(ours, theirs, text):
    tokenizer = AutoTokenizer.from_pretrained(ours)
    expected = theirs.encode(text, allowed_special="all")
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text) == [theirs.encode_single_token("<|begin_of_text|>"), *expected]
    assert tokenizer.decode(expected) == text
    assert len(tokenizer) == 700


def test_names_and_places_of_llama_3():
    tokens = special_tokens_after(128000, vocab_size=128256)
    assert len(set(tokens)) == 256
    places = {128000 + place: token for place, token in enumerate(tokens)}
    assert (places[128000], places[128001]) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert (places[128002], places[128003]) == ("<|reserved_special_token_0|>", "<|reserved_special_token_1|>")
    assert (places[128006], places[128007]) == ("<|start_header_id|>", "<|end_header_id|>")
    assert (places[128008], places[128009]) == ("<|eom_id|>", "<|eot_id|>")
    assert special_tokens_after(500, vocab_size=503)[2:] == ["<|finetune_right_pad_id|>"]


def test_ids_from_each_source(meta_tokenizer, ours, tmp_path):
    first = len(read_ranks(meta_tokenizer / "tokenizer.model"))
    lone = read_token_ids(find_assets(meta_tokenizer), vocab_size=700)
    assert lone == {"bos_token_id": first, "eos_token_id": [first + 1, first + 6, first + 7]}
    assert read_token_ids(find_assets(ours), vocab_size=700) == {"bos_token_id": first, "eos_token_id": first + 1}
    (ours / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}, "pad_token": None}))
    assert read_token_ids(find_assets(ours), vocab_size=700) == {"eos_token_id": first + 7}
    (ours / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "pad_token_id": None}))
    assert read_token_ids(find_assets(ours), vocab_size=700) == {"bos_token_id": 1, "eos_token_id": first + 7}
    assert read_token_ids({}, vocab_size=700) == {}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": [7, 8]}, {"bos_token_id": 600, "eos_token_id": [7, 8]}),
        (None, {"bos_token_id": 1, "eos_token_id": 2}, {"bos_token_id": 600, "eos_token_id": 601}),  # nobody set these
        (None, {"bos_token_id": 1, "eos_token_id": 7}, {"bos_token_id": 600, "eos_token_id": 7}),
        ({"eos_token_id": 9}, {"eos_token_id": 7}, {"bos_token_id": 600, "eos_token_id": 9}),
        ({"bos_token_id": 5}, {"eos_token_id": 7}, {"bos_token_id": 5, "eos_token_id": 601}),
        ({}, {"bos_token_id": None, "pad_token_id": 3}, {"bos_token_id": 600, "eos_token_id": 601, "pad_token_id": 3}),
    ],
)
def test_each_id_is_read_by_itself(ours, generation, config, expected):
    if generation is not None:
        (ours / "generation_config.json").write_text(json.dumps(generation))
    assert read_token_ids(find_assets(ours), vocab_size=700, config=config) == expected


def test_files_are_carried_and_a_generation_config_made(meta_tokenizer, tmp_path):
    (tmp_path / "src" / "original").mkdir(parents=True)
    (tmp_path / "src" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "src" / "original" / "tokenizer.model").write_bytes((meta_tokenizer / "tokenizer.model").read_bytes())
    (tmp_path / "src" / "README.md").write_text("stays")
    dst = tmp_path / "dst" / "assets"
    written = write_assets(dst, find_assets(tmp_path / "src"), {"bos_token_id": 3, "eos_token_id": [4, 5]})
    assert sorted(written) == sorted(p.name for p in dst.iterdir())
    assert sorted(written) == ["chat_template.jinja", "generation_config.json", "tokenizer.model"]
    assert GenerationConfig.from_pretrained(dst).eos_token_id == [4, 5]
    assert set(find_assets(tmp_path / "dst")) == set(written)
    assert write_assets(tmp_path / "none", {}, {}) == [] and not (tmp_path / "none").exists()


def test_sentencepiece_is_carried_not_translated(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    assert not looks_like_tiktoken(tmp_path / "tokenizer.model")
    assert write_tokenizer_for_hf(tmp_path, find_assets(tmp_path), vocab_size=32000, max_seq_len=1) == []


def test_damaged_tokenizers(meta_tokenizer, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_text("IQ== 0\nIg== x\n")
    with pytest.raises(CheckpointError, match="line 2"):
        read_ranks(path)
    path.write_text("IQ== 0\nIg== 2\n")
    with pytest.raises(CheckpointError, match="consecutive from 0"):
        read_ranks(path)
    assets = find_assets(meta_tokenizer)
    num_ranks = len(read_ranks(assets["tokenizer.model"]))
    for vocab_size in (500, num_ranks + 1):
        assert write_tokenizer_for_hf(tmp_path / "none", assets, vocab_size=vocab_size, max_seq_len=1) == []
        assert "no room for begin and end of text" in tokenizer_remark(assets, to="hf", vocab_size=vocab_size)
    assert tokenizer_remark(assets, to="hf", vocab_size=num_ranks + 2) == ""


def test_token_ids_of_other_tokenizers(tmp_path):
    assets = {name: tmp_path / name for name in ("tokenizer.json", "tokenizer_config.json")}
    assets["tokenizer_config.json"].write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')

    def ids_of(model) -> dict:
        Tokenizer(model).save(str(assets["tokenizer.json"]))
        return read_token_ids(assets, vocab_size=10)

    assert ids_of(models.WordLevel(vocab={"<s>": 4})) == {"bos_token_id": 4, "eos_token_id": 1}  # as the library says
    assert ids_of(models.Unigram([("<s>", 0.0), ("</s>", 0.0)])) == {"bos_token_id": 0, "eos_token_id": 1}
    assert ids_of(models.WordLevel(vocab={"<s>": 9, "</s>": 10})) == {"bos_token_id": 9}
    for content in ({}, {"model": None}, {"model": {}, "added_tokens": ["<s>"]}, {"model": {}, "added_tokens": [{}]}):
        assets["tokenizer.json"].write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="not a tokenizer"):
            read_token_ids(assets, vocab_size=10)
