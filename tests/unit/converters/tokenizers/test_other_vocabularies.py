"""Rank files of other vocabularies than Llama's under the name of Meta's file: refused, not read by Llama's rules."""

import json
from pathlib import Path

import pytest
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from converters.common.errors import UnsupportedError
from converters.tokenizers.assets import find_assets, read_token_ids, tokenizer_remark, write_tokenizer_for_hf
from converters.tokenizers.classes import class_name
from converters.tokenizers.tiktoken_from_json import ranks_of_tokenizer_json, write_ranks
from converters.tokenizers.tiktoken_model import BYTE_LETTERS, LLAMA4_PATTERN
from converters.tokenizers.tokenizer import load_tokenizer
from titan_tools.infer.text.chat_template import has_template, read_template

BYTE_OF = {letter: byte for byte, letter in BYTE_LETTERS.items()}
BYTES = [b"%c" % value for value in range(256)]


def write_model(folder: Path, num_ranks: int) -> None:
    tokens = [*BYTES, *(bytes([a, b, 33]) for a in range(128) for b in range(128))]
    tokens += [bytes([a, b, c, 33]) for a in range(64) for b in range(64) for c in range(64)]
    write_ranks(folder / "tokenizer.model", {token: rank for rank, token in enumerate(tokens[:num_ranks])})


@pytest.mark.parametrize(
    ("num_ranks", "named"), [(199_998, "o200k"), (151_643, "Qwen"), (100_256, "cl100k"), (50_256, "GPT-2")]
)
def test_a_file_that_comes_alone_is_refused_by_name(num_ranks, named, tmp_path):
    write_model(tmp_path, num_ranks)
    with pytest.raises(UnsupportedError, match=f"{num_ranks:,} ranks, as .*{named}") as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json beside it" in caught.value.hint
    with pytest.raises(UnsupportedError, match=named):
        read_template(tmp_path)
    assert not has_template(tmp_path)


def test_a_conversion_copies_it_and_says_why_no_other_is_made(tmp_path):
    write_model(tmp_path, 199_998)
    assets = find_assets(tmp_path)
    assert read_token_ids(assets, vocab_size=201_088) == {}
    assert write_tokenizer_for_hf(tmp_path, assets, vocab_size=201_088, max_seq_len=64) == []
    assert "199,998 ranks, as OpenAI's o200k" in tokenizer_remark(assets, to="hf", vocab_size=201_088)
    assert tokenizer_remark(assets, to="dcp", vocab_size=201_088) == ""


def test_a_file_of_another_size_is_read(tmp_path):
    write_model(tmp_path, 50_255)
    assert load_tokenizer(tmp_path).encode("a!") == [97, 33]


def test_o200k_in_a_tokenizer_json_gives_the_ids_of_tiktoken(tmp_path):
    """As GPT-OSS is published: the pattern and the special tokens stand in the file."""
    text = "Hello naïve WORLD's 12345 def f(x):\n\treturn x/2//3\n\n  don'T I'LL 漢字かな ÉtatsUnis"
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA4_PATTERN), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, letters]), decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=letters.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([text * 3], trainer)
    size = tokenizer.get_vocab_size()
    special = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    ranks = {
        bytes(map(BYTE_OF.__getitem__, token)): id
        for token, id in tokenizer.get_vocab(with_added_tokens=False).items()
        if id < size
    }
    harmony = tiktoken.Encoding(
        "harmony",
        pat_str=LLAMA4_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={token: size + i for i, token in enumerate(special)},
    )
    ours = load_tokenizer(tmp_path)
    said = f"<|start|>user<|message|>{text}<|end|><|start|>assistant<|channel|>final"
    assert ours.encode(said, special=True) == harmony.encode(said, allowed_special="all")
    assert ours.encode(said) == harmony.encode(said, disallowed_special=())
    assert ours.prefix_ids == ()  # Harmony's messages do not begin with <|startoftext|>
    assert read_token_ids(find_assets(tmp_path), vocab_size=size + 7)["eos_token_id"] == size + 2
    with pytest.raises(UnsupportedError):  # no file for Meta's code: it would split the text by Llama's rules
        ranks_of_tokenizer_json(tmp_path / "tokenizer.json", vocab_size=size + 7)


@pytest.mark.parametrize("named", ["BertTokenizer", "T5TokenizerFast", "SentencePieceBackend"])
def test_a_class_that_reads_by_other_rules_is_refused_by_name(named):
    with pytest.raises(UnsupportedError, match=f"the class {named.removesuffix('Fast')} of transformers"):
        class_name({"tokenizer_class": named}, {"model_type": "llama"}, is_byte_level=lambda: True)
