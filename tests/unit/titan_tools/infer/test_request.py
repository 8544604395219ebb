"""What was asked reaches started ranks as it was, whatever it is: every field, through a file."""

from dataclasses import fields
from datetime import datetime
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from converters.store.location import Location, locate
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.request import Request, load_request, save_request

# Bytes of the shell that are no UTF-8 arrive as lone surrogates; other halves cannot arrive, and survive all the same.
texts = st.text(st.characters(blacklist_categories=()), max_size=20)
paths = texts.filter(lambda text: text and "\0" not in text).map(lambda text: Path("/") / text.strip("/"))
places = paths.map(locate) | texts.map(lambda text: Location(f"s3://{text}"))
numbers = st.integers(1, 2**62)
by_type = {
    Path: paths,
    Path | None: st.none() | paths,
    Location: places,
    Location | None: st.none() | places,
    str | None: st.none() | texts,
    bool: st.booleans(),
    int: numbers,
    int | None: st.none() | numbers,
    tuple[str, ...]: st.lists(texts, max_size=3).map(tuple),
    float: st.floats(allow_nan=False),
    datetime: st.datetimes(),
    float | None: st.none() | st.floats(allow_nan=False),
}


def of(record, **known):
    """Records with something of the field's type in each field; a new type fails here."""
    return st.builds(record, **({field.name: by_type[field.type] for field in fields(record)} | known))


by_type[Sampling] = of(Sampling, seed=st.integers(-(2**63), 2**63))


@given(of(Request))
def test_every_field_arrives_as_it_was(tmp_path_factory, request):
    file = tmp_path_factory.getbasetemp() / "request.json"
    save_request(request, file)
    assert load_request(file) == request


def test_relative_paths_mean_the_folder_where_they_were_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = Request(
        locate("model"), Sampling(), batch=Path("../in.jsonl"), out=Path("out.jsonl"), model_from=locate(".")
    )
    save_request(given, tmp_path / "request.json")
    monkeypatch.chdir("/")
    arrived = load_request(tmp_path / "request.json")
    assert arrived.checkpoint.path == tmp_path / "model" and arrived.out == tmp_path / "out.jsonl"
    assert arrived.batch.resolve() == tmp_path.parent / "in.jsonl"
    assert arrived.model_from.path.resolve() == tmp_path
