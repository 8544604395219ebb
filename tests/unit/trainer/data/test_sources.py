"""Where documents come from: parquet, zstd, ready token ids; what is wrong with a file, and what may be skipped."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converters.common.errors import DataError, UnsupportedError
from trainer.data.index import open_index
from trainer.data.prepare import prepare
from trainer.data.sources import JSON_LINES, Skipped, find_files, read_documents
from trainer.data.streamed_text import stream_c4


def write_parquet(path, texts, *, column="text", kind=None, **options):
    table = pa.table({"number": list(range(len(texts))), column: pa.array(texts, kind)})
    pq.write_table(table, path, **options)
    return path


def texts_of(path, **options):
    return [document.text for document in read_documents([path], **options)]


def test_parquet_rows_are_documents_in_order(tmp_path):
    expected = [f"row {n} übergrößer" for n in range(3000)]
    path = write_parquet(tmp_path / "a.parquet", expected, row_group_size=700)
    assert texts_of(path) == expected
    assert [d.where for d in read_documents([path])][-1] == f"{path}:3000"
    large = write_parquet(tmp_path / "b.parquet", expected, column="body", kind=pa.large_string(), compression="zstd")
    assert texts_of(large, text_key="body") == expected
    assert find_files([tmp_path]) == [path, large]


TEXTS = ["a", "größer", "", "a"]
COLUMNS = {
    "string_view": pa.array(TEXTS, pa.string_view()),
    "categories": pa.array(TEXTS).dictionary_encode(),
    "categories of large_string": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
    "categories with small indices": pa.array(TEXTS).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string())),
    "bytes": pa.array([text.encode() for text in TEXTS]),
    "large bytes": pa.array([text.encode() for text in TEXTS], pa.large_binary()),
    "categories of bytes": pa.array([text.encode() for text in TEXTS]).dictionary_encode(),
    "an extension": pa.ExtensionArray.from_storage(pa.json_(), pa.array(TEXTS)),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_every_column_type_that_holds_text_is_read(tmp_path, column):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == ["a", "größer", "a"]  # documents without any text are left out
    if not isinstance(column.type, pa.BaseExtensionType):  # the datasets library reads its values as JSON
        assert list(stream_c4("train", str(tmp_path / "a.parquet")).texts(0)) == TEXTS


def test_a_pandas_category_with_missing_rows_is_read(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"text": pandas.Categorical(["x", None, "y"])}).to_parquet(tmp_path / "a.parquet")
    skipped = Skipped()
    assert [d.text for d in read_documents([tmp_path / "a.parquet"], skipped=skipped)] == ["x", "y"]
    assert skipped.count == 1 and "a.parquet:2: no text under 'text'" in skipped.first[0]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2]).dictionary_encode(),
        pa.array([b"0123456789abcdef"] * 2, pa.binary(16)),
        pa.ExtensionArray.from_storage(pa.opaque(pa.binary(), "geometry", "a vendor"), pa.array([b"POINT", b"LINE"])),
        pa.array([["a"], ["b"]]),
    ],
    ids=["categories of numbers", "bytes of one size", "bytes with another meaning", "lists"],
)
def test_columns_of_other_values_are_refused_with_their_type(tmp_path, column):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column of text called 'text'; there are 'text' "):
        texts_of(tmp_path / "a.parquet")


def test_bytes_that_are_no_text_are_reported_with_their_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [b"fine", b"\xff\xfe"], kind=pa.binary())
    with pytest.raises(DataError, match="a.parquet:2: byte 0 of the text is not UTF-8"):
        texts_of(path)
    with pytest.raises(DataError, match="cannot be read after 1 documents: UnicodeDecodeError"):
        list(stream_c4("train", str(path)).texts(0))


def test_json_in_a_folder_is_text_only_where_json_lines_are_asked_for(tmp_path):
    (tmp_path / "data.json").write_text('{"text": "x"}\n')  # as torchtitan's c4_test has it
    assert find_files([tmp_path], kinds=JSON_LINES) == [tmp_path / "data.json"]
    with pytest.raises(DataError, match="no file in it ends in .txt"):
        find_files([tmp_path])


def test_zstd_lines_are_read_like_any_others(tmp_path):
    lines = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(500)).encode()
    path = tmp_path / "a.jsonl.zst"
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(lines)
    assert texts_of(path) == [f"line {n}" for n in range(500)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a.jsonl.zst: cannot be read after line \d+: Truncated"):
        texts_of(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-9], "cannot be read after row 0"),
        (lambda data: b"PAR1", "cannot be read after row 0"),
        (
            lambda data: data.replace(data[(at := data.index(b"text 0")) - 30 : at], b"\xff" * 30),
            "cannot be read after row",
        ),
    ],
    ids=["truncated", "nothing", "page"],
)
@pytest.mark.parametrize("skipped", [None, Skipped()], ids=["strict", "skip_bad"])
def test_a_damaged_parquet_file_is_an_error_also_where_bad_rows_are_skipped(tmp_path, damage, message, skipped):
    path = write_parquet(
        tmp_path / "a.parquet", [f"text {n}" for n in range(500)], compression="none", use_dictionary=False
    )
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"a.parquet: {message}"):
        texts_of(path, skipped=skipped)


def test_a_column_that_is_not_text_is_reported_with_those_that_are_there(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x"], column="content")
    with pytest.raises(DataError, match=r"no column of text called 'text'; there are 'number' \(int64\), 'content'"):
        texts_of(path)
    with pytest.raises(DataError, match="no column of text called 'number'"):
        texts_of(path, text_key="number")


def test_bad_documents_are_reported_with_their_place_or_skipped_and_counted(tmp_path):
    lines = [
        b'{"text": "one"}',
        b"{oops",
        b'{"text": 3}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "two"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff")
    bad_utf8 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": pa.concat_arrays([pa.array(["three", None]), bad_utf8])}), tmp_path / "c.parquet")
    skipped = Skipped()
    found = [d.text for d in read_documents(find_files([tmp_path]), skipped=skipped)]
    assert found == ["one", "two", "three"]
    assert skipped.count == 7 and len(skipped.first) == 5
    assert [
        place in message for place, message in zip((":2:", ":3:", ":4:", ":5:", "b.txt:2:"), skipped.first, strict=True)
    ]
    for name, message in (
        ("a.jsonl", "a.jsonl:2: not JSON"),
        ("b.txt", "b.txt:2: byte 5"),
        ("c.parquet", "c.parquet:2: no"),
    ):
        with pytest.raises(DataError, match=message):
            texts_of(tmp_path / name)


def test_prepare_counts_what_it_skips(tmp_path, titan):
    records = [json.dumps({"text": f"Document {n} says that {n} is a number."}) for n in range(300)]
    (tmp_path / "clean.jsonl").write_text("\n".join(records))
    (tmp_path / "bad.jsonl").write_text("\n".join([*records[:100], "{oops", *records[100:], '{"text": null}']))
    clean = prepare([tmp_path / "clean.jsonl"], tmp_path / "clean", vocab_size=300)
    options = ("--vocab-size", "300", "--out", tmp_path / "skipped")
    code, _, err = titan("data", "prepare", tmp_path / "bad.jsonl", *options)
    assert code == 2 and "bad.jsonl:101: not JSON" in err and not (tmp_path / "skipped").exists()
    code, out, _ = titan("data", "prepare", tmp_path / "bad.jsonl", *options, "--skip-bad")
    assert code == 0 and "skipped           2 documents" in out and "bad.jsonl:302: 'text' is null" in out
    again = open_index(tmp_path / "skipped")
    assert again.fingerprint == open_index(clean.out).fingerprint and again.summary["text"]["skipped"] == 2


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    prepare([folder / "a.txt"], folder / "index", vocab_size=280, held_out=0.1)
    return folder / "index"


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_ready_token_ids_are_taken_as_they_are(index, tmp_path, dtype):
    ids = np.arange(1000).astype(dtype) % 280
    np.save(tmp_path / "ids.npy", ids)
    report = prepare([tmp_path / "ids.npy"], tmp_path / "index", tokenizer=index, held_out=0.1)
    made = open_index(tmp_path / "index")
    assert made.tokens("train").tolist() + made.tokens("held_out").tolist() == ids.tolist()
    assert (report.tokens, report.held_out_tokens, report.text_bytes) == (1000, 100, 0)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(5.0), r"holds float64\[5\]; token ids are one row of whole numbers"),
        (np.zeros((2, 3), np.int32), r"holds int32\[2, 3\]"),
        (np.array([3, -1]), "token 1 is -1; a token id is not negative"),
        (np.array([1, 279, 280, 2], np.uint16), "ids.npy: token 2 is 280, but the tokenizer has 280 tokens"),
        (np.array([{}], object), "not an array of token ids"),
        (np.array([], np.uint16), "every document is empty"),
    ],
)
def test_ids_that_cannot_be_are_reported(index, tmp_path, array, message):
    np.save(tmp_path / "ids.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / "ids.npy"], tmp_path / "index", tokenizer=index, held_out=0.3)
    assert not (tmp_path / "index").exists()


def test_ids_without_a_tokenizer_and_files_that_do_not_say_their_dtype_are_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(5))
    with pytest.raises(DataError, match="holds token ids, which no tokenizer can be trained on"):
        prepare([tmp_path / "ids.npy"], tmp_path / "index")
    (tmp_path / "train.bin").write_bytes(b"1234")
    with pytest.raises(UnsupportedError) as caught:
        find_files([tmp_path / "train.bin"])
    assert "numpy.fromfile" in caught.value.tries[0]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match="takes pyarrow") as caught:
        texts_of(path)
    assert caught.value.tries == ("pip install 'titan-tools[data]'",)
