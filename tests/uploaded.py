"""Run tests that read checkpoints from folders with uploads of these in the pretend store, too."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from converters.store.location import Location
from tests.pretend_store import ROOT, SCHEME, Objects

STORES = ("folder", SCHEME)
_numbers = count()


def upload(place: Path) -> Location:
    """Upload a folder, or the folder of a file. Returns the location of what was named."""
    folder, objects = place.parent if place.is_file() else place, Objects()
    prefix = f"uploads/{next(_numbers)}/{folder.name}"
    for path in folder.rglob("*"):
        if path.is_file():
            data = objects.upload()
            data.write(path.read_bytes())
            objects.put(f"{prefix}/{path.relative_to(folder).as_posix()}", data)
    return Location(f"{SCHEME}://{prefix}" + (f"/{place.name}" if place.is_file() else ""))


def read_from(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    functions: Sequence[str],
    *,
    others: Mapping[str, str] = {},  # noqa: B006
) -> None:
    """Run a test with these functions of its module reading what they are given from the store `request.param`.

    They get the location of an upload for every path to something. `others`: test → why it is of folders only.
    """
    if request.param == "folder":
        return
    if reason := others.get(request.node.originalname):
        pytest.skip(reason)
    monkeypatch.setenv(ROOT, str(request.getfixturevalue("tmp_path_factory").mktemp("pretend")))
    for name in functions:
        monkeypatch.setattr(request.module, name, partial(_call_with_uploads, getattr(request.module, name)))


def _call_with_uploads(function: Callable[..., Any], *places: Any, **options: Any) -> Any:
    named = {key: _uploaded(value) if key == "model_from" else value for key, value in options.items()}
    return function(*map(_uploaded, places), **named)


def _uploaded(value: Any) -> Any:
    return upload(Path(value)) if isinstance(value, str | Path) and Path(value).exists() else value
