"""Streamed text: one global order for any data-parallel degree, exact resume, every document once an epoch, no hang."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converters.common.errors import DataError
from converters.tokenizers.tokenizer import load_tokenizer
from trainer.data.prepare import prepare
from trainer.data.stream_loader import StreamLoader
from trainer.data.streamed_text import stream_c4

SEQ_LEN = 8
NUM_STREAMS = 8


def text_of(file: int, number: int) -> str:
    return f"Document {number} of file {file}" + " says more" * ((file + 2 * number) % 4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text("\n".join(text_of(file, number) for file in range(20) for number in range(10)))
    prepare([folder / "a.txt"], folder / "index", vocab_size=280, held_out=0.1)
    return load_tokenizer(folder / "index")


def write_c4(folder, *, num_files, num_documents, split="train"):
    """Files as C4 has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(num_files):
        records = [{"text": text_of(file, n), "timestamp": "", "url": ""} for n in range(num_documents)]
        with gzip.open(folder / f"c4-{split}.{file:05}-of-{num_files:05}.json.gz", "wt") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)
    return folder


@pytest.fixture(scope="module")
def many_files(tmp_path_factory):
    return stream_c4("train", str(write_c4(tmp_path_factory.mktemp("c4"), num_files=19, num_documents=6)))


@pytest.fixture(scope="module")
def few_files(tmp_path_factory):
    return stream_c4("train", str(write_c4(tmp_path_factory.mktemp("c4"), num_files=3, num_documents=40)))


def on_ranks(degree, case):
    """`case(rank, on_each)` in a thread per rank; what each returned. `on_each` is that of trainer/ranks/agree.py."""
    slots, barrier = [None] * degree, Barrier(degree, timeout=60)

    def on_each_of(rank):
        def on_each(work):
            try:
                slots[rank] = work(), None
            except DataError as error:
                slots[rank] = None, error
            barrier.wait()
            found = list(slots)
            barrier.wait()
            if error := next((error for _, error in found if error), None):
                raise error
            return [result for result, _ in found]

        return on_each

    with ThreadPoolExecutor(degree) as threads:
        return list(threads.map(lambda rank: case(rank, on_each_of(rank)), range(degree)))


def read(text, tokenizer, degree, count, *, batch=8, state=None, seq_len=SEQ_LEN, seed=7, num_streams=NUM_STREAMS):
    """The next global batches, as rows of tokens in rank order, and the state after each."""

    def case(rank, on_each):
        loader = StreamLoader(
            text,
            lambda document: tokenizer.encode(document, bos=True, eos=True),
            fingerprint="f00d",
            num_streams=num_streams,
            seq_len=seq_len,
            global_batch_size=batch,
            dp_rank=rank,
            dp_degree=degree,
            seed=seed,
            on_each=on_each,
        )
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        found = []
        for step in islice(loader, count):
            assert step.tokens.shape == (batch // degree, seq_len)
            assert (step.tokens[:, 1:] == step.targets[:, :-1]).all()
            found.append((step.tokens.tolist(), step.targets[:, -1].tolist(), loader.state_dict()))
        return found

    ranks = on_ranks(degree, case)
    batches = [sum((tokens for tokens, _, _ in step), []) for step in zip(*ranks, strict=True)]
    states = [[state for _, _, state in step] for step in zip(*ranks, strict=True)]
    assert all(state == step[0] for step in states for state in step)
    return batches, [step[0] for step in states]


@pytest.mark.parametrize(("kind", "batch"), [("many_files", 24), ("few_files", 16)])
def test_any_degree_that_divides_the_streams_reads_the_same_global_batches(request, tokenizer, kind, batch):
    text = request.getfixturevalue(kind)
    expected, states = read(text, tokenizer, 1, 12, batch=batch)
    for degree in (2, 4, 8):
        assert read(text, tokenizer, degree, 12, batch=batch) == (expected, states)


def test_a_batch_that_does_not_divide_the_streams_is_dealt_alike_too(many_files, tokenizer):
    expected = read(many_files, tokenizer, 1, 12, batch=12)
    for degree in (2, 4):
        assert read(many_files, tokenizer, degree, 12, batch=12) == expected
    samples = [position[-1] for position in expected[1][-1]["positions"]]
    assert sum(samples) == 12 * 12 and max(samples) - min(samples) <= 1


@pytest.mark.parametrize(("kind", "degree"), [("many_files", 1), ("few_files", 8), ("many_files", 8)])
def test_a_state_saved_at_degree_4_resumes_at_any(request, tokenizer, kind, degree):
    text = request.getfixturevalue(kind)
    whole, states = read(text, tokenizer, 1, 14)
    state = read(text, tokenizer, 4, 5)[1][-1]
    assert state == states[4]
    assert read(text, tokenizer, degree, 9, state=state) == (whole[5:], states[5:])


def test_another_batch_size_and_seq_len_go_on_at_the_same_token(many_files, tokenizer):
    """What each stream gives, one token after another, is the same however it is cut."""

    def by_stream(batches, states, start):
        rows = {}
        before = start
        for batch, state in zip(batches, states, strict=True):
            for number, (old, new) in enumerate(zip(before, state["positions"], strict=True)):
                if new[-1] > old[-1]:
                    assert new[-1] == old[-1] + 1
                    rows.setdefault(number, []).append(batch[number])
            before = state["positions"]
        return {number: sum(rows[number], []) for number in rows}

    zero = [[0] * 5] * NUM_STREAMS
    batches, states = read(many_files, tokenizer, 1, 12)
    whole = by_stream(batches, states, zero)
    first, saved = read(many_files, tokenizer, 2, 4)
    longer, more = read(many_files, tokenizer, 4, 4, state=saved[-1], seq_len=2 * SEQ_LEN)
    again = by_stream(longer, more, saved[-1]["positions"])
    begun = by_stream(first, saved, zero)
    assert {number: begun[number] + again[number] for number in range(NUM_STREAMS)} == whole
    other, after = read(many_files, tokenizer, 1, 2, state=saved[-1], batch=32)
    assert other[0] == [row for number in range(8) for row in (b[number] for b in batches[4:8])]


@pytest.mark.parametrize("kind", ["many_files", "few_files"])
def test_every_document_comes_once_an_epoch_and_epochs_differ(request, tokenizer, kind):
    text = request.getfixturevalue(kind)
    expected = sorted(document.text for document in text.documents())
    _, states = read(text, tokenizer, 1, 1, num_streams=1, batch=1)
    batches, states = read(text, tokenizer, 1, 800, num_streams=1, batch=1)
    tokens = [token for batch in batches for token in batch[0]]
    bos, texts = tokenizer.ends.begin, []
    for token in tokens:
        texts.append([]) if token == bos else texts[-1].append(token)
    documents = [tokenizer.decode(ids[:-1]) for ids in texts[:-1]]
    assert len(documents) > 2 * len(expected)
    first, second = documents[: len(expected)], documents[len(expected) : 2 * len(expected)]
    assert sorted(first) == sorted(second) == expected
    assert first != second


@pytest.mark.parametrize("kind", ["many_files", "few_files"])
def test_streams_share_no_document(request, tokenizer, kind):
    """Of fewer files than streams, each stream takes documents of every file."""
    batches, _ = read(request.getfixturevalue(kind), tokenizer, 1, 40, num_streams=4, batch=4)
    found = []
    for stream in range(4):
        tokens = [token for batch in batches for token in batch[stream]]
        texts = tokenizer.decode(tokens).split(tokenizer.decode([tokenizer.ends.begin]))[1:-1]  # the last one is cut
        found += texts
    assert len(found) > 20 and len(set(found)) == len(found)


def test_seeds_give_other_orders_and_another_seed_is_refused_with_both_named(many_files, tokenizer):
    one, states = read(many_files, tokenizer, 1, 3)
    two, _ = read(many_files, tokenizer, 1, 3, seed=8)
    assert one != two
    with pytest.raises(DataError, match="begun with seed 7, and is to be resumed with seed 8"):
        read(many_files, tokenizer, 1, 1, seed=8, state=states[-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "beef/8 streams"}, "fingerprint f00d/8 streams now, beef/8 streams then"),
        ({"fingerprint": "f00d/64 streams"}, "begun with 64 streams, and is to be resumed with 8 streams"),
        ({"positions": []}, "damaged"),
        ({"positions": [[0, 0, 0, 0]] * 8}, "damaged"),
        ({"positions": [[0, 0, 0, 0, -1]] * 8}, "damaged"),
        ({"version": 2}, "not one that this titan wrote"),
        ({"consumed_samples": 3}, "not one that this titan wrote"),
    ],
)
def test_a_state_of_another_run_is_refused(many_files, tokenizer, change, message):
    _, states = read(many_files, tokenizer, 1, 1)
    with pytest.raises(DataError, match=message) as caught:
        read(many_files, tokenizer, 1, 1, state=states[0] | change)
    assert caught.value.tries[-1] == "--checkpoint.exclude_from_loading dataloader"


def test_a_stream_without_documents_stops_all_ranks_at_once(tmp_path, tokenizer):
    text = stream_c4("train", str(write_c4(tmp_path, num_files=1, num_documents=5)))
    with pytest.raises(DataError, match="stream 5 of 8 has no document") as caught:
        read(text, tokenizer, 4, 1)
    assert caught.value.hint == "there are fewer documents than streams"


def test_a_corrupt_line_is_reported_with_its_file_on_all_ranks(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "fine enough to read"}\n' * 3 + "{oops\n")
    with pytest.raises(DataError, match=r"file 0: cannot be read after .*JSON parse error"):
        read(stream_c4("train", str(tmp_path)), tokenizer, 2, 3, num_streams=2)


def test_where_files_come_from(tmp_path):
    write_c4(tmp_path / "clone" / "en", num_files=3, num_documents=1)
    write_c4(tmp_path / "clone" / "en", num_files=2, num_documents=1, split="validation")
    write_c4(tmp_path / "clone" / "de", num_files=4, num_documents=1)
    assert stream_c4("train", str(tmp_path / "clone")).num_files == 3
    assert stream_c4("validation", str(tmp_path / "clone")).num_files == 2
    one = min((tmp_path / "clone" / "en").glob("c4-train*"))
    assert list(stream_c4("train", str(one)).texts(0)) == [text_of(0, 0)]
    pq.write_table(pa.table({"text": ["one", "two"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert list(stream_c4("validation", str(tmp_path / "a.parquet")).texts(0, skip=1)) == ["two"]
    with pytest.raises(DataError, match="none of its validation split"):
        stream_c4("validation", str(one))
    with pytest.raises(DataError, match="no such file or folder"):
        stream_c4("train", str(tmp_path / "nowhere"))
    write_c4(tmp_path / "both", num_files=1, num_documents=1)
    (tmp_path / "a.parquet").rename(tmp_path / "both" / "c4-train.parquet")
    with pytest.raises(DataError, match="cannot be streamed together"):
        stream_c4("train", str(tmp_path / "both"))


def test_the_hub_is_asked_for_english_c4_and_reported_of_when_it_cannot_be_reached(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="cannot be reached: ConnectionError: Couldn't reach") as caught:
        stream_c4("train", None)
    assert asked == [(("allenai/c4", "en"), {"split": "train", "streaming": True})]
    assert "--training.dataset_path FOLDER" in caught.value.tries
