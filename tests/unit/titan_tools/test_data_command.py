"""`titan data prepare`: output and exit codes."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.torchtitan_release import write_tokenizer


@pytest.fixture
def titan(titan, tmp_path, monkeypatch):
    """Run in the test's folder."""
    monkeypatch.chdir(tmp_path)
    return titan


def test_the_default_sources_become_an_index_in_data(titan, tmp_path):
    done = titan("data", "prepare", "--max-bytes", "300000", "--vocab-size", "400")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "data" / "index.json").read_text())
    assert f"{summary['text']['tokens']:,}" in done.stdout and "Python standard library" in done.stdout
    assert f"{summary['unigram']['unigram_cross_entropy']:.3f} nats/token" in done.stdout
    again = titan("data", "prepare", "--max-bytes", "300000", "--vocab-size", "400")
    assert again.returncode == 2 and "exists already" in again.stderr and "try: --overwrite" in again.stderr
    assert titan("data", "prepare", "--max-bytes", "300000", "--vocab-size", "410", "--overwrite").returncode == 0
    assert json.loads((tmp_path / "data" / "index.json").read_text())["vocab_size"] == 410


def test_files_folders_keys_and_a_tokenizer_as_json(titan, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("A text about nothing much at all.\n" * 20)
    (tmp_path / "b.jsonl").write_text('{"body": "And another one, of another kind."}\n' * 20)
    first = titan("data", "prepare", "b.jsonl", "--text-key", "body", "--out", "one", "--vocab-size", "270", "--json")
    assert json.loads(first.stdout)["documents"] == 20
    second = titan("data", "prepare", "texts", "--tokenizer", "one", "--out", "two", "--held-out", "0.3", "--json")
    report = json.loads(second.stdout)
    assert (report["vocab_size"], report["tokenizer"], report["held_out_by"]) == (270, "one", "tail")
    assert report["unigram_entropy"] <= report["unigram_cross_entropy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "no such file or folder"),
        (["bad.jsonl"], "bad.jsonl:2: not JSON"),
        (["bad.txt"], "bad.txt:1: byte 0 of the file is not UTF-8"),
        (["empty.txt"], "every document is empty"),
        (["fine.txt", "--held-out", "2"], "must be between 0 and 1"),
        (["fine.txt", "--tokenizer", "nowhere"], "is not a folder"),
        (["fine.txt", "--vocab-size", "9000"], "too small or too uniform"),
        (["fine.txt", "--out", "fine.txt"], "is not a folder"),
        (["fine.txt", "--out", "/proc/data"], "cannot be created"),
        (["--vocab-size", "many"], "Invalid value for '--vocab-size'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_an_error_and_leaves_nothing(titan, tmp_path, arguments, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text\n')
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "fine.txt").write_text("fine " * 100)
    before = sorted(tmp_path.iterdir())
    done = titan("data", "prepare", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_missing_tokens_of_a_tokenizer_are_reported(titan, tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("the other one\n" * 300)
    done = titan("data", "prepare", "a.txt", "--tokenizer", "tokenizer", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "<|begin_of_text|> 263, <|end_of_text|> 264" in done.stderr
    assert "no token for 162 of the 256 bytes" in done.stderr


def test_special_tokens_are_counted_as_text_or_read_as_tokens(titan, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer")
    text = "<|begin_of_text|>a chat<|end_of_text|>" * 2
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": text}) + "\n") * 3)
    options = ("a.jsonl", "--tokenizer", "tokenizer", "--held-out", "0", "--json")
    plain = titan("data", "prepare", *options, "--out", "plain")
    report = json.loads(plain.stdout)
    assert report["special_tokens_as_text"] == {"<|begin_of_text|>": 3, "<|end_of_text|>": 3}
    assert "<|begin_of_text|> in 3 documents" in plain.stderr and "--special-tokens reads them" in plain.stderr
    special = titan("data", "prepare", *options, "--special-tokens", "--out", "special")
    report = json.loads(special.stdout)
    assert (report["special_tokens"], report["special_tokens_as_text"]) == (True, {})
    assert "--special-tokens" not in special.stderr
    ids = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(text, add_special_tokens=False).input_ids
    assert np.load(tmp_path / "special" / "train_tokens.npy").tolist()[1 : len(ids) + 1] == ids
