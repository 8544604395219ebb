"""Two tokenizers in one folder: whether they give the same ids, and which of them each reader takes."""

import json
import shutil
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from converters.tokenizers.agreement import compare_tokenizers, disagreement
from converters.tokenizers.assets import find_assets, tokenizer_remark
from converters.tokenizers.sentencepiece_model import read_sentencepiece, write_tokenizer_of_sentencepiece
from converters.tokenizers.tiktoken_model import special_tokens_after, write_hf_tokenizer
from converters.tokenizers.tokenizer import load_tokenizer, tokenizer_note
from trainer.data.train_tokenizer import train_ranks, write_tokenizer

TEXT = "import os, 1234567 words;  don't\n\n\tself.it's = naïve"

LONG = TEXT + Path(textwrap.__file__).read_text("utf-8")


def texts(*names: str) -> list[str]:
    return [Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text("utf-8") for name in names]


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agreeing")
    write_tokenizer(folder, train_ranks(texts("textwrap", "shlex", "csv"), vocab_size=640))
    return folder


@pytest.fixture(scope="module")
def of_sentencepiece(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("\n".join(texts("textwrap", "csv")))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=500, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    write_tokenizer_of_sentencepiece(folder, read_sentencepiece(folder / "tokenizer.model"), max_seq_len=64)
    return folder


def changed(source: Path, folder: Path, change) -> Path:
    """A copy whose tokenizer.json was changed."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def swap_two_tokens(content):
    vocab = content["model"]["vocab"]
    a, b = [token for token, id in vocab.items() if id in (300, 301)]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def cut_spaces_off(content):
    split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = split["Regex"].replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{L}+")


def leave_out_merges(content):
    content["model"]["merges"] = content["model"]["merges"][:40]
    content["model"]["ignore_merges"] = False


def other_order(content):
    content["model"]["merges"].reverse()
    content["model"]["ignore_merges"] = False


def lower_case(content):
    content["normalizer"] = {"type": "Lowercase"}


CHANGES = {
    swap_two_tokens: "2 tokens have different ids",
    cut_spaces_off: "does not split text by Llama 3's pattern",
    leave_out_merges: "is merged differently",
    other_order: "not in the order of their tokens",
    lower_case: "normalizes text",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_where_they_disagree_tokenizer_json_is_read_as_in_transformers(agreeing, tmp_path, change):
    folder = changed(agreeing, tmp_path / "x", change)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert ours.encode(LONG) == theirs(LONG, add_special_tokens=False).input_ids
    assert ours.encode(LONG) != load_tokenizer(agreeing).encode(LONG)
    assert CHANGES[change] in tokenizer_note(folder) and "tokenizer.json is read" in tokenizer_note(folder)
    remark = tokenizer_remark(find_assets(folder), to="meta", vocab_size=640)
    assert CHANGES[change] in remark and remark.endswith("Meta's code reads tokenizer.model")
    assert "torchtune reads tokenizer.model" in tokenizer_remark(find_assets(folder), to="torchtune", vocab_size=640)
    assert tokenizer_remark(find_assets(folder), to="hf", vocab_size=640) == ""
    of_meta = tokenizer_remark(find_assets(folder), to="hf", vocab_size=640, of_meta=True)
    assert of_meta.endswith("transformers reads tokenizer.json")


def test_where_they_agree_nothing_is_said(agreeing, tmp_path):
    assert compare_tokenizers(agreeing / "tokenizer.json", agreeing / "tokenizer.model").problems == ()
    assert tokenizer_note(agreeing) == ""
    assert tokenizer_remark(find_assets(agreeing), to="meta", vocab_size=640) == ""
    # Merges as older versions of tokenizers spell them, and fewer that give the same ids
    old = changed(agreeing, tmp_path / "old", lambda content: content["model"].update(
        merges=[" ".join(merge) for merge in content["model"]["merges"]]))  # fmt: skip
    assert tokenizer_note(old) == ""
    assert tokenizer_note(Path(tmp_path / "nowhere")) == ""


def test_a_file_that_changes_is_compared_again(agreeing, tmp_path):
    folder = changed(agreeing, tmp_path / "x", lambda content: None)
    assert tokenizer_note(folder) == ""
    content = json.loads((folder / "tokenizer.json").read_text())
    swap_two_tokens(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "2 tokens" in tokenizer_note(folder)


def test_special_tokens_that_meta_s_code_places_elsewhere(agreeing, tmp_path):
    """Ranks agree, so either reader may be taken here; Meta's code numbers the special tokens by itself."""

    def rename(content):
        content["added_tokens"][4]["content"] = "<|mine|>"
        content["post_processor"] = None

    folder = changed(agreeing, tmp_path / "x", rename)
    assert tokenizer_note(folder) == ""
    remark = tokenizer_remark(find_assets(folder), to="meta", vocab_size=640)
    assert "special token '<|mine|>'" in remark and "Meta's code gives it none" in remark


def test_sentencepiece_and_its_own_json_agree(of_sentencepiece):
    assert disagreement(find_assets(of_sentencepiece)) == ""
    theirs = AutoTokenizer.from_pretrained(of_sentencepiece)
    assert load_tokenizer(of_sentencepiece).encode(TEXT) == theirs(TEXT, add_special_tokens=False).input_ids


def drop_a_merge(content):
    content["model"]["merges"].pop(5)


def no_bytes(content):
    content["model"]["byte_fallback"] = False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_two_tokens, "2 tokens have different ids"),
        (drop_a_merge, "its merges are not those"),
        (lower_case, "normalizes or splits text differently"),
        (no_bytes, "does not encode unknown characters as bytes"),
    ],
)
def test_sentencepiece_against_another_json(of_sentencepiece, tmp_path, change, message):
    folder = changed(of_sentencepiece, tmp_path / "x", change)
    assert message in tokenizer_note(folder)
    assert message in tokenizer_remark(find_assets(folder), to="meta", vocab_size=500)
    theirs = AutoTokenizer.from_pretrained(folder)
    if change is not lower_case:  # transformers' Llama class makes its own normalizer
        assert load_tokenizer(folder).encode("import os") == theirs("import os", add_special_tokens=False).input_ids


def test_neither_kind(agreeing, tmp_path):
    shutil.copytree(agreeing, tmp_path / "x")
    (tmp_path / "x/tokenizer.model").write_bytes(b"\x00 nothing known")
    assert "neither tiktoken nor SentencePiece" in tokenizer_note(tmp_path / "x")


@pytest.mark.slow
def test_a_vocabulary_of_llama_3_s_size_takes_a_second(tmp_path):
    """CPU seconds, since neighbours may take the clock's."""
    import base64
    import random

    draw = random.Random(0)
    tokens, known = [bytes([value]) for value in range(256)], {bytes([value]) for value in range(256)}
    while len(tokens) < 128000:
        made = draw.choice(tokens) + draw.choice(tokens[:2000])
        if len(made) <= 12 and made not in known:
            known.add(made)
            tokens.append(made)
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_text(lines)
    write_hf_tokenizer(tmp_path, tmp_path / "tokenizer.model", vocab_size=128256, max_seq_len=64)
    assert len(special_tokens_after(128000, vocab_size=128256)) == 256
    started = time.process_time()
    assert compare_tokenizers(tmp_path / "tokenizer.json", tmp_path / "tokenizer.model").problems == ()
    assert time.process_time() - started < 2.0
    started = time.process_time()
    assert compare_tokenizers(tmp_path / "tokenizer.json", tmp_path / "tokenizer.model").problems == ()
    assert time.process_time() - started < 0.1
