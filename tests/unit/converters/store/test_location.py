"""Locations: a URI stays as it was typed, a path is what `Path` makes of it."""

from pathlib import Path

import pytest

from converters.common.errors import UnsupportedError
from converters.store.location import locate


@pytest.mark.parametrize("text", ["s3://b/x", "s3://b/run/step-1", "mem+file://b/a b/x.pt", "file:///x/y"])
def test_parts_of_uris(text):
    location = locate(text)
    assert (str(location), location.scheme) == (text, text.partition(":")[0])
    assert (location.name, location.suffix) == (text.split("/")[-1], Path(text).suffix)
    assert str(location.parent) == text.rpartition("/")[0]
    assert location.parent / location.name == location
    assert str(location.with_name("y")) == f"{text.rpartition('/')[0]}/y"
    with pytest.raises(UnsupportedError, match="not a path"):
        location.path  # noqa: B018


def test_the_slash_at_the_end_of_a_uri_is_no_name():
    location = locate("s3://bucket/step-1/")
    assert str(location) == "s3://bucket/step-1/"
    assert str(location / "x") == "s3://bucket/step-1/x"
    assert str(location.parent.parent.parent) == "s3://"


@pytest.mark.parametrize("text", ["x", "./x/", "/x//y", "..", ".", "a:b"])
def test_paths_are_those_of_pathlib(text):
    location, path = locate(text), Path(text)
    assert (str(location), location.scheme, location.path) == (str(path), "", path)
    assert locate(path) == location == locate(location)
    assert (location.name, location.parent.path, (location / "y").path) == (path.name, path.parent, path / "y")


@pytest.mark.parametrize("place", ["S3://bucket/x", "s3:/bucket/x", "gs_x://bucket/x", Path("s3://bucket/x")])
def test_what_is_almost_a_uri_is_no_path(place):
    with pytest.raises(UnsupportedError, match="neither a path nor a URI"):
        locate(place)
    with pytest.raises(UnsupportedError, match="neither a path nor a URI"):
        locate("outputs") / str(place)
    assert locate("C:/x").path == Path("C:/x") and locate("/s3:/x").path == Path("/s3:/x")
