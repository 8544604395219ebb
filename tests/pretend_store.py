"""A pretend object store for tests: `pretend://…` is read by names and ranges only, as an object store is.

Objects are files of a bucket, under encoded names: there are no directories, links, times or renames, only keys, bytes
and an identity for each upload. A list may lag: it leaves out objects that were uploaded with `is_listed=False`.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

import pytest

from converters.common.errors import CheckpointError
from converters.store.base import register_store
from converters.store.location import Location
from converters.store.mirror import copy_small_files, new_mirror
from converters.store.paths import NotAFile

STORES = ("folder", "pretend")
_numbers = count()


@cache
def bucket() -> Path:
    """The folder of all objects of this process."""
    register_store("pretend", open_pretend)
    return Path(mkdtemp(prefix="bucket-"))


def put(key: str, data: bytes, *, is_listed: bool = True) -> None:
    """Store an object, or replace it."""
    path = bucket() / quote(key, safe="")
    path.with_name(f"{path.name}.new").write_bytes(data)
    path.with_name(f"{path.name}.info").write_text(json.dumps([uuid4().hex, is_listed]))
    os.replace(path.with_name(f"{path.name}.new"), path)


def upload(place: Path, *, lagging: Sequence[str] = ()) -> Location:
    """Upload a folder, or the folder of a file. Returns the location of what was named."""
    folder = place.parent if place.is_file() else place
    prefix = f"{next(_numbers)}/{folder.name}"
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            put(f"{prefix}/{name}", path.read_bytes(), is_listed=name not in lagging)
    return Location(f"pretend://{prefix}" + (f"/{place.name}" if place.is_file() else ""))


class PretendStore:
    """The objects below one key."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._mirror: Path | None = None
        self.num_read: dict[str, int] = {}  # bytes by name

    @property
    def location(self) -> Location:
        return Location(f"pretend://{self._prefix}")

    def names(self, folder: str = "") -> list[str]:
        start = f"{folder}/" if folder else ""
        inside = (name.removeprefix(start) for name in self.walk() if name.startswith(start))
        return sorted({name.partition("/")[0] + ("/" if "/" in name else "") for name in inside})

    def walk(self) -> list[str]:
        keys = (unquote(path.name) for path in bucket().iterdir() if not path.name.endswith((".info", ".new")))
        names = (key.removeprefix(f"{self._prefix}/") for key in keys if key.startswith(f"{self._prefix}/"))
        return sorted(name for name in names if self._info(name)[1])

    def size(self, name: str) -> int:
        self._info(name)
        return self._object(name).stat().st_size

    def identity(self, name: str) -> tuple[str | int, ...]:
        return (self._info(name)[0],)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._info(name)
        self.num_read[name] = self.num_read.get(name, 0) + len(buffer)
        with self._object(name).open("rb") as file:
            file.seek(start)
            num_read = file.readinto(buffer)
        if num_read < len(buffer):
            raise CheckpointError(f"{self.location / name}: the file ends at byte {start + num_read}")

    def local(self, names: Iterable[str] = ()) -> Path:
        self._mirror = self._mirror or new_mirror(self.location)
        copy_small_files(self, names, self._mirror)
        return self._mirror

    def close(self) -> None:
        pass

    def _object(self, name: str) -> Path:
        return bucket() / quote(f"{self._prefix}/{name}", safe="")

    def _info(self, name: str) -> tuple[str, bool]:
        path = self._object(name)
        if not path.is_file():
            raise NotAFile(self.location / name, "missing", hint="the checkpoint is incomplete")
        identity, is_listed = json.loads(path.with_name(f"{path.name}.info").read_text())
        return identity, is_listed


def open_pretend(location: Location) -> tuple[PretendStore, str]:
    """The opener of `pretend://…`."""
    key = location.text.partition("://")[2].rstrip("/")
    if (bucket() / quote(key, safe="")).is_file():
        return PretendStore(key.rpartition("/")[0]), location.name
    store = PretendStore(key)
    if not store.names():
        raise CheckpointError(f"{location}: no such file or folder")
    return store, ""


def read_from(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    functions: Sequence[str],
    *,
    others: Mapping[str, str] = {},  # noqa: B006
) -> None:
    """Run a test with the functions of its module reading what they are given from the store `request.param`.

    They get the location of an upload for every path to something. `others`: test → why it is of folders only.
    """
    if request.param == "folder":
        return
    if reason := others.get(request.node.originalname):
        pytest.skip(reason)
    for name in functions:
        monkeypatch.setattr(request.module, name, partial(_call_uploaded, getattr(request.module, name)))


def _call_uploaded(function: Callable[..., Any], *places: Any, **options: Any) -> Any:
    named = {key: _uploaded(value) if key == "model_from" else value for key, value in options.items()}
    return function(*map(_uploaded, places), **named)


def _uploaded(value: Any) -> Any:
    return upload(Path(value)) if isinstance(value, str | Path) and Path(value).exists() else value
