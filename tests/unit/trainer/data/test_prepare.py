"""Text to a token index: what is written, what is measured, what is refused; whole or not at all."""

import gzip
import json
import math
import os
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters.common.errors import DataError, TitanError, UnsupportedError
from converters.tokenizers.tokenizer import load_tokenizer
from trainer.data import prepare as prepare_module
from trainer.data.index import open_index
from trainer.data.prepare import prepare
from trainer.data.samples import SourceSamples
from trainer.data.sources import find_files, read_documents, standard_library
from trainer.data.write_index import unigram_nats

SHAKESPEARE = Path(__file__).resolve().parents[5] / "shared" / "data" / "tinyshakespeare.txt"
STDLIB = Path(sysconfig.get_path("stdlib"))


def write_texts(folder: Path, texts: list[str], *, suffix: str = ".txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04}{suffix}").write_text(text, "utf-8")
    return folder


def write_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def make(sources, out: Path, **rest):
    return prepare(sources, out, **({"vocab_size": 300} | rest))


def texts_of(folder: Path, split: str) -> list[str]:
    """The documents of a split, read back with numpy and the tokenizer alone."""
    tokenizer = load_tokenizer(folder)
    tokens, offsets = np.load(folder / f"{split}_tokens.npy"), np.load(folder / f"{split}_offsets.npy")
    documents = [tokens[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    for ids in documents:
        assert ids[0] == tokenizer.ends.begin and ids[-1] == tokenizer.ends.end
    return [tokenizer.decode(ids[1:-1]) for ids in documents]


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """An index of 400 short documents, with a tenth of them held out."""
    folder = tmp_path_factory.mktemp("many")
    records = [{"text": f"Document {n} says that {n} is followed by {n + 1}.\n"} for n in range(400)]
    make([write_lines(folder / "many.jsonl", records)], folder / "index", held_out=0.1)
    return folder / "index"


def test_every_document_comes_back_once(many):
    train, held_out = texts_of(many, "train"), texts_of(many, "held_out")
    expected = {f"Document {n} says that {n} is followed by {n + 1}.\n" for n in range(400)}
    assert set(train) | set(held_out) == expected and len(train) + len(held_out) == 400
    assert 20 <= len(held_out) <= 60


def test_index_json_says_what_is_there(many):
    index = open_index(many)
    text = index.summary["text"]
    train, held_out = index.tokens("train"), index.tokens("held_out")
    assert train.dtype == np.uint16 and isinstance(train, np.memmap)
    assert text["tokens"] == len(train) + len(held_out) and text["held_out_tokens"] == len(held_out)
    assert (text["documents"], text["held_out_by"]) == (400, "document")
    assert len(index.offsets("held_out")) == text["held_out_documents"] + 1
    assert text["text_bytes"] == sum(len(t.encode()) for split in ("train", "held_out") for t in texts_of(many, split))
    assert index.vocab_size == 300 > max(train.max(), held_out.max())


def test_entropies_are_those_of_the_held_out_part(many):
    """Against sums written out in plain Python."""
    index = open_index(many)
    train, held_out = Counter(index.tokens("train").tolist()), Counter(index.tokens("held_out").tolist())
    total = held_out.total()
    own = -sum(n / total * math.log(n / total) for n in held_out.values())
    cross = -sum(n / total * math.log((train[t] + 1) / (train.total() + 300)) for t, n in held_out.items())
    assert index.summary["unigram"]["unigram_entropy"] == pytest.approx(own, rel=1e-12)
    assert index.summary["unigram"]["unigram_cross_entropy"] == pytest.approx(cross, rel=1e-12)
    assert unigram_nats(np.array([1, 1, 0]), model=np.array([1, 1, 0])) == pytest.approx(math.log(2))


def test_the_same_text_gives_the_same_files(many, tmp_path):
    make([many.parent / "many.jsonl"], tmp_path / "again", held_out=0.1)
    for path in many.iterdir():
        again = (tmp_path / "again" / path.name).read_bytes()
        assert again == path.read_bytes(), path.name


def test_the_fingerprint_changes_with_any_decisive_thing(many, tmp_path):
    source = many.parent / "many.jsonl"
    edited = tmp_path / "edited.jsonl"
    edited.write_text(source.read_text().replace("Document 7 ", "Document 8 "))
    make([edited], tmp_path / "text", held_out=0.1)
    make([source], tmp_path / "share", held_out=0.2)
    make([source], tmp_path / "vocab", held_out=0.1, vocab_size=301)
    prints = {open_index(folder).fingerprint for folder in (many, *(tmp_path / n for n in ("text", "share", "vocab")))}
    assert len(prints) == 4


def test_one_long_text_gives_its_tail(tmp_path):
    """Also real text where this checkout has it; else a book of the standard library's size class."""
    source = SHAKESPEARE if SHAKESPEARE.is_file() else STDLIB / "argparse.py"
    text = source.read_text("utf-8")
    report = prepare([source], tmp_path / "index", vocab_size=512, held_out=0.05)
    (train,), (held_out,) = texts_of(tmp_path / "index", "train"), texts_of(tmp_path / "index", "held_out")
    assert train + held_out == text
    assert len(held_out) == round(len(text) * 0.05)
    assert (report.documents, report.held_out_by) == (1, "tail")


def test_equal_documents_stay_on_one_side(tmp_path):
    records = [{"text": f"text {n % 100} of a hundred"} for n in range(300)]
    make([write_lines(tmp_path / "a.jsonl", records)], tmp_path / "index", held_out=0.2)
    assert not set(texts_of(tmp_path / "index", "train")) & set(texts_of(tmp_path / "index", "held_out"))


def test_an_existing_tokenizer_is_used_and_carried(many, tmp_path):
    source = write_texts(tmp_path / "texts", ["Document 5 says nothing."] * 3)
    report = make([source], tmp_path / "index", tokenizer=many, held_out=0.2)
    assert (report.vocab_size, report.tokenizer) == (300, str(many))
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "index" / name).read_bytes() == (many / name).read_bytes()
    with pytest.raises(DataError, match="tokenizer"):
        make([source], tmp_path / "other", tokenizer=tmp_path)


def test_large_vocabularies_take_four_bytes(many, tmp_path):
    folder = tmp_path / "wide"
    folder.mkdir()
    described = json.loads((many / "tokenizer.json").read_text())
    described["model"]["vocab"]["far"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(described))
    for name in ("tokenizer.model", "generation_config.json"):
        (folder / name).write_bytes((many / name).read_bytes())
    make([many.parent / "many.jsonl"], tmp_path / "index", tokenizer=folder)
    assert open_index(tmp_path / "index").tokens("train").dtype == np.uint32


def test_sources_of_every_kind_are_read_in_order(tmp_path):
    write_texts(tmp_path / "b", ["one", "two"])
    write_texts(tmp_path / "b" / "deeper", ["three"], suffix=".md")
    (tmp_path / "b" / "config.json").write_text("{\n}")  # in a folder .json is not text
    (tmp_path / "b" / ".hidden.txt").write_text("no")
    os.symlink(tmp_path / "b", tmp_path / "b" / "loop")
    with gzip.open(tmp_path / "a.json.gz", "wt", encoding="utf-8") as file:
        file.write('{"text": "four", "url": "x"}\n\n{"text": ""}\n{"text": "fünf"}\n')
    files = find_files([tmp_path / "b", tmp_path / "a.json.gz", tmp_path / "b" / "0000.txt"])
    documents = list(read_documents(files))
    assert [document.text for document in documents] == ["one", "two", "three", "four", "fünf"]
    assert documents[-1].where.endswith("a.json.gz:4")
    assert [document.text for document in read_documents(files, max_bytes=8)] == ["one", "two"]


def test_the_standard_library_is_a_bounded_repeatable_sample():
    root, files = standard_library(max_bytes=400_000)
    sizes = [path.stat().st_size for path in files]
    assert 390_000 < sum(sizes) <= 400_000
    assert (root, files) == standard_library(max_bytes=400_000)
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)


def test_the_embedded_default_is_quick(tmp_path):
    report = prepare([], tmp_path / "index", vocab_size=512, max_bytes=400_000)
    assert report.secs < 15 and report.documents > 10 and report.text_bytes <= 400_000


@pytest.mark.parametrize(
    ("name", "data", "output"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n["text"]\n', "a.jsonl:2: a JSON list, not an object"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x"}\n', "a.jsonl:2: no text under 'text'; the line has 'body'"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: 'text' is a number, not a string"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl:2: byte 10 of the line is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: a lone surrogate"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl:1: not JSON"),
        ("a.txt", b"one\ntwo \xff\n", "a.txt:2: byte 8 of the file is not UTF-8"),
        ("a.txt", b"", "every document is empty"),
        ("a.jsonl", b"\n\n", "every document is empty"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz: cannot be read after line 0"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 50, mtime=0)[:-9], "cannot be read"),
        ("a.txt", b"ab", "too small or too uniform"),
    ],
)
def test_text_that_cannot_be_read_is_reported_with_its_place(tmp_path, name, data, output):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        make([tmp_path / name], tmp_path / "out" / "index")
    assert output in caught.value.message
    assert list((tmp_path / "out").iterdir()) == []


def test_wrong_sources_and_numbers_are_reported(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    text = write_texts(tmp_path / "texts", ["some text"])
    for error, output, sources, rest in [
        (DataError, "no such file or folder", [tmp_path / "nowhere"], {}),
        (DataError, "no file in it ends in .txt", [tmp_path / "empty"], {}),
        (UnsupportedError, "files of this kind are not read", [tmp_path / "a.pdf"], {}),
        (DataError, "held-out share is 1.5", [text], {"held_out": 1.5}),
        (DataError, "held-out share is nan", [text], {"held_out": math.nan}),
        (DataError, "--max-bytes is 0", [text], {"max_bytes": 0}),
        (DataError, "cannot hold 256 bytes", [text], {"vocab_size": 100}),
        (
            DataError,
            "has 9 characters or ids, of which a share of 1e-06 is none",
            [text],
            {"vocab_size": 266, "held_out": 1e-6},
        ),
    ]:
        with pytest.raises(error, match=output):
            make(sources, tmp_path / "index", **rest)
        assert not (tmp_path / "index").exists()


def test_an_existing_folder_is_kept_unless_it_is_an_index_to_overwrite(many, tmp_path):
    source = [many.parent / "many.jsonl"]
    make(source, tmp_path / "index")
    before = open_index(tmp_path / "index").fingerprint
    with pytest.raises(TitanError, match="exists"):
        make(source, tmp_path / "index", vocab_size=310)
    assert open_index(tmp_path / "index").fingerprint == before
    make(source, tmp_path / "index", vocab_size=310, overwrite=True)
    assert open_index(tmp_path / "index").vocab_size == 310
    precious = write_texts(tmp_path / "precious", ["mine"])
    with pytest.raises(TitanError):
        make(source, precious, overwrite=True)
    assert (precious / "0000.txt").read_text() == "mine"


def test_a_failure_half_way_leaves_the_old_index_and_nothing_else(many, tmp_path, monkeypatch):
    make([many.parent / "many.jsonl"], tmp_path / "index")
    before = open_index(tmp_path / "index").fingerprint

    def fail(*args, **rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_module, "write_json", fail)
    with pytest.raises(DataError, match="cannot be written: No space"):
        make([many.parent / "many.jsonl"], tmp_path / "index", vocab_size=310, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert open_index(tmp_path / "index").fingerprint == before


def copy_index(many: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in many.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["train_tokens.npy", "held_out_offsets.npy", "tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_changed_file_is_found(many, tmp_path, name, damage):
    folder = copy_index(many, tmp_path / "index")
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    {"flip": lambda: path.write_bytes(data), "truncate": lambda: path.write_bytes(data[:-1]), "remove": path.unlink}[
        damage
    ]()
    with pytest.raises(DataError, match=f"{name} missing or changed"):
        open_index(folder)


def test_a_changed_or_foreign_index_json_is_reported(many, tmp_path):
    folder = copy_index(many, tmp_path / "index")
    path = folder / "index.json"
    summary = json.loads(path.read_text())
    for change, output in [
        ({"vocab_size": 4096}, "changed by hand"),
        ({"version": 2}, "version 2; this titan reads version 1"),
        ({"files": None}, "is not the index"),
        ({"fingerprint": "0" * 32}, "changed by hand"),
    ]:
        path.write_text(json.dumps(summary | change))
        with pytest.raises(DataError, match=output):
            open_index(folder)
    for content in ("", "[]", "{}", "{"):
        path.write_text(content)
        with pytest.raises(DataError, match="is not the index"):
            open_index(folder)
    path.unlink()
    with pytest.raises(DataError, match="holds no token index") as caught:
        open_index(folder)
    assert caught.value.tries == (f"titan data prepare --out {folder}",)
    with pytest.raises(DataError, match="is no folder"):
        open_index(tmp_path / "nowhere")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.binary(max_size=30) | st.sampled_from([b'{"text": "a"}', b'{"text": 1}', b"{"]), max_size=5))
def test_only_titan_errors_leave_whatever_the_lines_hold(tmp_path, data):
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"\n".join(data))
    try:
        for document in read_documents([path]):
            document.text.encode("utf-8")
    except TitanError as error:
        assert f"{path}:" in error.message


def test_a_few_short_documents_have_a_held_out_part(tmp_path):
    """2 % of a short line's characters is none: the share is then one of documents, and never of equal ones."""
    source = write_lines(tmp_path / "k.jsonl", [{"text": f"item {n} is {n % 7}"} for n in range(200)])
    for share, expected in ((0.02, 4), (0.001, 1)):
        report = make([source], tmp_path / f"{share}", held_out=share, vocab_size=270)
        assert (report.held_out_by, report.held_out_documents, report.documents) == ("document", expected, 200)
        assert len(texts_of(tmp_path / f"{share}", "train")) == 200 - expected


def test_a_text_that_is_too_short_is_refused_with_its_numbers(many, tmp_path):
    source = write_lines(tmp_path / "same.jsonl", [{"text": "tiny"}] * 3)
    with pytest.raises(DataError, match=r"longest of its documents \(3\) has 4 characters") as error:
        make([source], tmp_path / "index", tokenizer=many)
    assert error.value.tries[0] == "--held-out 0.5"
    assert make([source], tmp_path / "half", tokenizer=many, held_out=0.5).held_out_by == "tail"


def test_nothing_is_held_out_where_that_is_asked_for(many, tmp_path):
    report = make([many.parent / "many.jsonl"], tmp_path / "index", held_out=0)
    assert (report.held_out_by, report.held_out_tokens, report.held_out_documents) == ("nothing", 0, 0)
    assert len(texts_of(tmp_path / "index", "train")) == 400
    with pytest.raises(DataError, match="no held-out part to validate on"):
        SourceSamples(open_index(tmp_path / "index"), "held_out", seq_len=8, seed=0)
    assert SourceSamples(open_index(tmp_path / "index"), "train", seq_len=8, seed=0).num_samples


def test_a_first_document_that_is_too_long_is_cut(tmp_path):
    (tmp_path / "huge.txt").write_text("äöü words " * 400)
    for most in (1000, 1001):
        (document,) = read_documents([tmp_path / "huge.txt"], max_bytes=most)
        assert len(document.text.encode()) in (most, most - 1) and ("äöü words " * 400).startswith(document.text)
    report = make([tmp_path / "huge.txt"], tmp_path / "index", max_bytes=1000, vocab_size=270)
    assert report.text_bytes <= 1000
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.uint16))
    (document,) = read_documents([tmp_path / "ids.npy"], max_bytes=21)
    assert document.ids.tolist() == list(range(10))


def test_where_every_document_was_skipped_that_is_said(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"no document could be read, and 1 were skipped.*\n.*bad.txt:1: byte 0"):
        make([tmp_path], tmp_path / "index", skip_bad=True)


@pytest.mark.parametrize(
    ("value", "kind"), [(5, "a number"), (True, "a boolean"), ([], "a list"), ({}, "an object"), (None, "null")]
)
def test_text_of_another_kind_is_called_what_it_is(tmp_path, value, kind):
    source = write_lines(tmp_path / "m.jsonl", [{"text": "a"}, {"text": value}])
    with pytest.raises(DataError, match=rf"m.jsonl:2: 'text' is {kind}, not a string"):
        list(read_documents([source]))


def test_what_folders_hold_next_to_text_is_counted_and_nothing_is_read_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "mixed" / ".git", ["x"])
    for name in ("a.txt", "b.txt", "x.bin", "c.rst", "d.rst", "README", ".hidden"):
        (tmp_path / "mixed" / name).write_text(f"{name} has some words. " * 40)
    (tmp_path / "link").symlink_to("mixed")
    (tmp_path / "mixed" / "more").symlink_to("..")
    sources = [Path("mixed"), Path("mixed/a.txt"), Path("./mixed"), tmp_path / "mixed", Path("link")]
    report = make(sources, tmp_path / "index", vocab_size=270)
    assert report.documents == 2 and report.source == "mixed, mixed/a.txt"
    assert report.left_out == {"hidden": 2, ".rst": 2, "links to folders": 1, "no ending": 1, ".bin": 1}
