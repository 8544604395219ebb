"""Text named in a config: an index that is made once, kept, and made again when text, tokenizer or length change."""

import json
import os
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converters.common.errors import DataError
from converters.tokenizers.tokenizer import load_tokenizer
from tests.torchtitan_release import write_first_run
from tests.unit.trainer.data.test_streams import write_c4
from trainer.config.sections import Training
from trainer.data import streamed_text, text_index
from trainer.data.datasets import open_dataset
from trainer.data.document_text import before_special_token, document_encoder
from trainer.data.index import open_index
from trainer.data.loader import TokenLoader
from trainer.data.prepare import prepare
from trainer.data.sample import NO_DOCUMENTS
from trainer.data.text_index import Preparation
from trainer.data.training_data import open_training_data

TEXTS = [f"Document {n} says that {n} is followed by {n + 1}." for n in range(200)]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A token index of the same text, whose tokenizer reads the others."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare([folder / "a.jsonl"], folder / "index", vocab_size=290, held_out=0.1)
    return folder / "index"


@pytest.fixture
def preparation(index, tmp_path):
    said = []
    preparation = Preparation(index, tmp_path / "indexes", once=lambda work: work(), say=said.append)
    return preparation, said


def write(kind, folder):
    folder.mkdir(exist_ok=True)
    if kind == "text":
        for number, text in enumerate(TEXTS):
            (folder / f"{number:04}.txt").write_text(text)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet")
    else:
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def documents_of(source, tokenizer):
    text = tokenizer.decode(source.tokens("train").tolist())
    begin, end = (tokenizer.decode([id]) for id in (tokenizer.ends.begin, tokenizer.ends.end))
    return [piece.removeprefix(begin) for piece in text.split(end)[:-1]]


@pytest.mark.parametrize("kind", ["c4_test", "jsonl", "text", "parquet"])
def test_all_of_a_text_is_read_by_training_and_by_validation(preparation, index, tmp_path, kind):
    prepared, said = preparation
    source = open_dataset(kind, str(write(kind, tmp_path / "data")), vocab_size=290, preparation=prepared)
    assert documents_of(source, load_tokenizer(index)) == TEXTS
    assert np.array_equal(source.tokens("train"), source.tokens("held_out"))
    assert source.unigram_entropy > 1 and source.vocab_size == 290
    assert len(said) == 1 and "making tokens of dataset" in said[0]
    rest = {"seq_len": 16, "global_batch_size": 4, "dp_rank": 0, "dp_degree": 1}
    assert next(iter(TokenLoader(source, "train", seed=1, **rest))).tokens.shape == (4, 16)


def test_an_index_is_made_once_and_again_when_the_text_or_the_tokenizer_changes(preparation, index, tmp_path):
    prepared, said = preparation
    data = write("jsonl", tmp_path / "data")

    def fingerprint(prepared=prepared):
        return open_dataset("jsonl", str(data), vocab_size=300, preparation=prepared).fingerprint

    first = fingerprint()
    assert (fingerprint(), len(said)) == (first, 1)
    os.utime(data / "a.jsonl", (1, 1))  # a copy of the same text is the same text
    assert (fingerprint(), len(said)) == (first, 1)
    (data / "a.jsonl").write_text((data / "a.jsonl").read_text().replace("Document 7 ", "Document 8 "))
    changed = fingerprint()
    assert changed != first and len(said) == 2
    prepare([data / "a.jsonl"], tmp_path / "other", vocab_size=300, held_out=0.1)
    other = Preparation(tmp_path / "other", prepared.folder, once=prepared.once, say=said.append)
    assert fingerprint(other) not in (first, changed) and len(said) == 3
    assert sorted(path.name for path in prepared.folder.iterdir() if path.is_dir()) == sorted(
        said_once.rpartition("/")[2] for said_once in said
    )


def test_a_resume_after_text_or_tokenizer_changed_is_refused_with_the_way_out(preparation, index, tmp_path):
    prepared, _ = preparation
    data = write("jsonl", tmp_path / "data")

    def loader(prepared=prepared):
        source = open_dataset("jsonl", str(data), vocab_size=300, preparation=prepared)
        return TokenLoader(source, "train", seq_len=16, global_batch_size=2, dp_rank=0, dp_degree=1, seed=0)

    state = loader().state_dict()
    loader().load_state_dict(state)
    prepare([data / "a.jsonl"], tmp_path / "other", vocab_size=300, held_out=0.1)
    other = Preparation(tmp_path / "other", prepared.folder, once=prepared.once)
    changed_text = tmp_path / "data" / "a.jsonl"
    for changed in (lambda: loader(other), lambda: (changed_text.write_text('{"text": "new"}\n' * 99), loader())[1]):
        with pytest.raises(DataError, match="is not that of the checkpoint") as caught:
            changed().load_state_dict(state)
        assert caught.value.tries == ("--checkpoint.exclude_from_loading dataloader",)


def test_a_damaged_or_unfinished_index_is_made_again(preparation, index, tmp_path):
    prepared, said = preparation
    data = write("jsonl", tmp_path / "data")
    open_dataset("jsonl", str(data), vocab_size=290, preparation=prepared)
    place = Path(said[0].rpartition(" stay in ")[2])
    (place / "train_tokens.npy").write_bytes(b"damaged")
    (prepared.folder / ".tmp-killed").mkdir()
    source = open_dataset("jsonl", str(data), vocab_size=290, preparation=prepared)
    assert documents_of(source, load_tokenizer(index)) == TEXTS
    assert len(said) == 2 and not (prepared.folder / ".tmp-killed").exists()


def test_a_failure_leaves_nothing_that_looks_like_an_index(preparation, tmp_path, monkeypatch):
    prepared, _ = preparation
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{oops\n')
    with pytest.raises(DataError, match="a.jsonl:2: not JSON"):
        open_dataset("jsonl", str(tmp_path / "a.jsonl"), vocab_size=290, preparation=prepared)
    assert not [path for path in prepared.folder.iterdir() if path.is_dir()]

    def fail(*args, **rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text_index, "write_json", fail)
    with pytest.raises(DataError, match="cannot be written: No space left"):
        open_dataset("text", str(write("text", tmp_path / "data")), vocab_size=290, preparation=prepared)
    assert not [path for path in prepared.folder.iterdir() if path.is_dir()]


def test_two_runs_that_begin_at_once_make_it_once(preparation, tmp_path):
    prepared, said = preparation
    data = write("jsonl", tmp_path / "data")
    threads = [
        Thread(target=open_dataset, args=("jsonl", str(data)), kwargs={"vocab_size": 290, "preparation": prepared})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no text: every document is empty"),
        (b"\n\n", "there is no text"),
        (b'{"text": ""}\n', "there is no text"),
        (b'{"text": "x"}\n{"body": 1}\n', "a.jsonl:2: no text under 'text'; the line has 'body'"),
        (b'{"text": "\xff"}', "a.jsonl:1: byte 10 of the line is not UTF-8"),
    ],
)
def test_text_that_cannot_be_read_is_reported_with_its_place(preparation, tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_dataset("c4_test", str(tmp_path / "a.jsonl"), vocab_size=290, preparation=preparation[0])


def test_what_a_kind_does_not_hold_and_a_missing_tokenizer_are_reported(preparation, tmp_path):
    prepared, _ = preparation
    data = write("jsonl", tmp_path / "data")
    with pytest.raises(DataError, match="no file in it ends in .parquet"):
        open_dataset("parquet", str(data), vocab_size=290, preparation=prepared)
    with pytest.raises(DataError, match="go up to 289, but the model has 100 embedding rows"):
        open_dataset("jsonl", str(data), vocab_size=100, preparation=prepared)
    lost = Preparation(tmp_path / "nowhere", prepared.folder, once=prepared.once)
    with pytest.raises(DataError, match="is text, and model.hf_assets_path = .*nowhere' holds no tokenizer") as caught:
        open_dataset("jsonl", str(data), vocab_size=290, preparation=lost)
    assert "--model.hf_assets_path FOLDER" in caught.value.tries


def test_torchtitans_sample_is_read_where_its_users_start_a_run(tmp_path, monkeypatch):
    write_first_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    said = []
    prepared = Preparation(Path("tests/assets/tokenizer"), tmp_path / "made", once=lambda work: work(), say=said.append)
    source = open_dataset("c4_test", None, vocab_size=2048, preparation=prepared)
    assert said[0] == "dataset c4_test without dataset_path: reading tests/assets/c4_test, as torchtitan does"
    texts = [json.loads(line)["text"] for line in Path("tests/assets/c4_test/data.json").read_text().splitlines()]
    tokenizer = load_tokenizer(prepared.tokenizer)
    assert documents_of(source, tokenizer) == [tokenizer.decode(tokenizer.encode(text)) for text in texts]


def test_c4s_validation_is_an_index_of_its_beginning(preparation, index, tmp_path):
    prepared, said = preparation
    folder = write_c4(tmp_path / "c4", num_files=3, num_documents=30, split="validation")
    write_c4(folder, num_files=2, num_documents=5)  # of the training part, which is left alone
    options = {"vocab_size": 290, "preparation": prepared}
    whole = open_dataset("c4_validation", str(folder), **options)
    assert len(documents_of(whole, load_tokenizer(index))) == 90
    first = open_dataset("c4_validation", str(folder), most_tokens=200, **options)
    assert 200 <= len(first.tokens("held_out")) < 300
    assert np.array_equal(first.tokens("held_out"), whole.tokens("held_out")[: len(first.tokens("held_out"))])
    assert len(documents_of(open_dataset("c4", str(folder), most_tokens=10**6, **options), load_tokenizer(index))) == 10
    assert len(said) == 3
    with pytest.raises(DataError, match="too long to validate on as a whole"):
        open_dataset("c4", str(folder), **options)


def test_c4s_validation_is_fetched_from_the_hub_once(preparation, tmp_path, monkeypatch):
    prepared, said = preparation
    local, asked = streamed_text.stream_c4, []

    def fetch(split, path):
        asked.append((split, path))
        return local(split, str(write_c4(tmp_path / "c4", num_files=2, num_documents=5, split="validation")))

    monkeypatch.setattr("trainer.data.datasets.stream_c4", fetch)
    for _ in range(2):
        open_dataset("c4_validation", None, vocab_size=290, preparation=prepared)
    assert asked == [("validation", None)] and "from the hub" in said[0]


def test_an_index_of_its_own_holds_what_prepare_would_write(preparation, index, tmp_path):
    source = open_dataset("jsonl", str(write("jsonl", tmp_path / "data")), vocab_size=290, preparation=preparation[0])
    prepared = open_index(index)
    assert source.tokenizer_digests == prepared.tokenizer_digests and len(prepared.tokenizer_digests) == 2
    assert len(source.tokens("train")) == len(prepared.tokens("train")) + len(prepared.tokens("held_out"))


# --- special tokens written in documents

CHATS = ["<|end_of_text|>first<|begin_of_text|>", "nothing", "second<|end_of_text|>", "<|begin_of_tex"]


def test_special_tokens_of_a_text_are_text_that_is_reported_or_tokens(preparation, index, tmp_path):
    prepared, said = preparation
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CHATS))
    special = replace(prepared, special_tokens=True)
    tokenizer = load_tokenizer(index)

    def loader(preparation):
        source = open_dataset("jsonl", str(tmp_path / "a.jsonl"), vocab_size=300, preparation=preparation)
        expected = [tokenizer.encode(t, bos=True, eos=True, special=preparation.special_tokens) for t in CHATS]
        assert source.tokens("train").tolist() == sum(expected, [])
        return TokenLoader(source, "train", seq_len=4, global_batch_size=2, dp_rank=0, dp_degree=1, seed=0)

    plain = loader(prepared)
    assert said[1] == (
        "special tokens written in documents are read as text: <|end_of_text|> in 2 documents, <|begin_of_text|> in 1;"
        " training.special_tokens = true reads them as tokens"
    )
    with pytest.raises(DataError, match="is not that of the checkpoint"):
        loader(special).load_state_dict(plain.state_dict())
    assert len(said) == 3  # the second index is made, and nothing more
    loader(prepared).load_state_dict(plain.state_dict())
    assert len(said) == 3


def test_the_streams_report_once_that_special_tokens_are_text(index):
    said: list[str] = []
    tokenizer = load_tokenizer(index)
    as_text, as_tokens = (document_encoder(tokenizer, special_tokens=flag, say=said.append) for flag in (False, True))
    for special, encode in ((False, as_text), (True, as_tokens)):
        assert [encode(t) for t in CHATS] == [tokenizer.encode(t, bos=True, eos=True, special=special) for t in CHATS]
    assert len(said) == 1 and "holds <|begin_of_text|>" in said[0] and "training.special_tokens = true" in said[0]


def test_streamed_text_has_special_tokens_as_asked_and_another_position(preparation, tmp_path):
    prepared, said = preparation
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CHATS))
    tokenizer = load_tokenizer(prepared.tokenizer)

    def loader(special):
        training = Training(dataset="c4", dataset_path=str(tmp_path / "a.jsonl"), dataset_streams=1, seq_len=50)
        batches = {"global_batch_size": 1, "dp_rank": 0, "dp_degree": 1, "seed": 0, "documents": NO_DOCUMENTS}
        text = replace(prepared, special_tokens=special)
        return open_training_data(training, text, vocab_size=300, on_each=lambda work: [work()], **batches)

    for special in (False, True):
        expected = sum((tokenizer.encode(text, bos=True, eos=True, special=special) for text in CHATS), [])
        found = next(iter(loader(special))).tokens[0].tolist()
        assert found[: len(expected)] == expected[: len(found)]
    assert sum("are read as text" in line for line in said) == 1
    with pytest.raises(DataError, match="is not that of the checkpoint"):
        loader(True).load_state_dict(loader(False).state_dict())


def test_a_held_out_tail_begins_beside_a_special_token(index):
    tokenizer, text = load_tokenizer(index), "ab<|end_of_text|>cd"
    cuts = [before_special_token(tokenizer, text, cut) for cut in range(len(text) + 1)]
    assert cuts == [0, 1, 2, *[2] * 14, 17, 18, 19]
