"""Llama 4's tokenizer.model: how it splits text, and its special tokens; tiktoken says which ids are right."""

import inspect
import json
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from converters.common.errors import UnsupportedError
from converters.tokenizers import tiktoken_model
from converters.tokenizers.assets import find_assets, read_token_ids
from converters.tokenizers.assets import write_tokenizer_for_hf as write_for_hf
from converters.tokenizers.assets import write_tokenizer_for_meta as write_for_meta
from converters.tokenizers.tiktoken_from_json import ranks_of_tokenizer_json, write_ranks
from converters.tokenizers.tiktoken_model import LLAMA4_PATTERN, special_tokens_after
from converters.tokenizers.tokenizer import load_tokenizer

# Of config.json and generation_config.json of the published models, and the comments of Meta's list
IDS = {
    "<|begin_of_text|>": 200000,
    "<|end_of_text|>": 200001,
    "<|header_start|>": 200005,
    "<|header_end|>": 200006,
    "<|eom|>": 200007,
    "<|eot|>": 200008,
    "<|finetune_right_pad|>": 200018,
    "<|text_post_train_reserved_special_token_68|>": 200079,
    "<|image_start|>": 200080,
    "<|image_end|>": 200081,
    "<|patch|>": 200092,
    "<|vision_reserved_special_token_1047|>": 201133,
    "<|reasoning_thinking_end|>": 201143,
}
TEXT = "Hello naïve WORLD's 12345 def f(x):\n\treturn x/2//3\n\n  don'T I'LL 漢字かな ру́сский 🙂👩‍👩‍👧 ÉtatsUnis" * 3
ROWS = 2648
NUM_RANKS = 600


@pytest.fixture
def model_file(tmp_path, monkeypatch) -> Path:
    """A tokenizer.model of 600 ranks, which counts as Llama 4's."""
    monkeypatch.setattr(tiktoken_model, "_LLAMA4_RANKS", NUM_RANKS)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA4_PATTERN), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, letters]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_RANKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text(), TEXT], trainer)
    tokenizer.add_special_tokens(special_tokens_after(NUM_RANKS, vocab_size=ROWS))
    tokenizer.save(str(tmp_path / "trained.json"))
    ranks = ranks_of_tokenizer_json(tmp_path / "trained.json", vocab_size=ROWS)
    (tmp_path / "release").mkdir()
    write_ranks(tmp_path / "release/tokenizer.model", ranks)
    return tmp_path / "release/tokenizer.model"


def test_the_pattern_is_that_of_o200k(monkeypatch):
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    assert "o200k_base" in inspect.getsource(tiktoken_ext.openai_public)
    assert tiktoken_ext.openai_public.o200k_base()["pat_str"] == LLAMA4_PATTERN


def test_special_tokens_have_their_published_ids():
    tokens = special_tokens_after(200000, vocab_size=202048)
    assert len(tokens) == len(set(tokens)) == 2048
    assert {name: 200000 + tokens.index(name) for name in IDS} == IDS
    assert tokens[-1] == f"<|reserved_special_token_{2048 - 1144 - 1}|>"
    assert special_tokens_after(200000, vocab_size=200003) == tokens[:3]


def test_ids_are_those_of_tiktoken(model_file, tmp_path):
    ranks = tiktoken_model.read_ranks(model_file)
    special = {t: NUM_RANKS + i for i, t in enumerate(special_tokens_after(NUM_RANKS, vocab_size=ROWS))}
    theirs = tiktoken.Encoding("t", pat_str=LLAMA4_PATTERN, mergeable_ranks=dict(ranks), special_tokens=special)
    expected = theirs.encode(TEXT)
    llama3 = tiktoken.Encoding(
        "t", pat_str=tiktoken_model.LLAMA3_PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
    )
    assert llama3.encode(TEXT) != expected
    write_for_hf(tmp_path, {"tokenizer.model": model_file}, vocab_size=ROWS, max_seq_len=64)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode(TEXT, add_special_tokens=False) == expected
    assert ours.encode("<|eot|>") == [special["<|begin_of_text|>"], special["<|eot|>"]]
    alone = load_tokenizer(model_file.parent)
    assert alone.encode(TEXT) == expected and alone.decode(expected) == TEXT


def test_what_ends_a_generation(model_file):
    ids = read_token_ids(find_assets(model_file.parent), vocab_size=ROWS)
    assert ids == {"bos_token_id": NUM_RANKS, "eos_token_id": [NUM_RANKS + 1, NUM_RANKS + 7, NUM_RANKS + 8]}


def test_a_tokenizer_json_becomes_a_tokenizer_model_again(model_file, tmp_path):
    """Also with transformers' names of reserved tokens, which are other ones; not with Llama 3's way of splitting."""
    write_for_hf(tmp_path, {"tokenizer.model": model_file}, vocab_size=ROWS, max_seq_len=64)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        if token["content"] == "<|text_post_train_reserved_special_token_8|>":
            token["content"] = "<|text_post_train_reserved_special_token_66|>"
        elif token["content"] == "<|text_post_train_reserved_special_token_66|>":
            token["content"] = "<|text_post_train_reserved_special_token_8|>"
    path.write_text(json.dumps(content))
    (tmp_path / "again").mkdir()
    assert write_for_meta(tmp_path / "again", {"tokenizer.json": path}, vocab_size=ROWS) == ["tokenizer.model"]
    assert (tmp_path / "again/tokenizer.model").read_bytes() == model_file.read_bytes()
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = tiktoken_model.LLAMA3_PATTERN
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="does not split text by Llama 4's pattern"):
        ranks_of_tokenizer_json(path, vocab_size=ROWS)
