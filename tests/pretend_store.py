"""An object store in a folder: objects can be created and replaced as a whole, deleted, listed and read by ranges.

There is no rename, no link, no directory, no time and no writing at an offset. What the product sees of it is
`pretend://BUCKET/KEY`, and processes share it. An object is a file with 32 hex digits, its identity, before its bytes.

A list may lag (LAG), so nothing is decided from one alone: the files of a whole checkpoint are those of its manifest,
and an index beside the checkpoints of a folder, which is read by its key, has all that were committed or begun.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from converters.common.errors import CheckpointError, Missing
from converters.common.names import DCP_METADATA, MANIFEST
from converters.store.base import Store, register_store
from converters.store.journal import Journal
from converters.store.location import Location
from converters.store.mirror import local_copies
from converters.store.output import Claimed, Locked, can_resume
from converters.store.outputs import register_outputs
from converters.store.paths import MissingFile

SCHEME = "pretend"
ROOT = "TITAN_PRETEND_STORE"  # the environment variable that names the folder
LAG = "TITAN_PRETEND_LAG"  # lists of a key's folder before one of them shows that it was created or deleted
FOREVER = 1 << 30  # as a lag: no list ever shows what has changed
UNFINISHED = ".unfinished"
INDEX = ".index"
_IDENTITY_BYTES = 32


class Objects:
    """The objects of the store, by key."""

    def __init__(self) -> None:
        root = Path(os.environ[ROOT])
        self._root, self._parts, self._created, self._deleted = (
            root / name for name in ("objects", "parts", "created", "deleted")
        )
        for folder in (self._root, self._parts, self._created, self._deleted):
            folder.mkdir(parents=True, exist_ok=True)

    def listed(self, prefix: str) -> set[str]:
        """The keys that a list shows. It may not show new ones yet, and show deleted ones still."""
        keys = self._below(self._root, prefix)
        created, deleted = (self._count_list(folder, prefix) for folder in (self._created, self._deleted))
        return (keys - created) | deleted

    def present(self, prefix: str) -> set[str]:
        """The keys of all objects, which no list need show."""
        return self._below(self._root, prefix)

    def catch_up(self, prefix: str) -> None:
        """From now on lists show all that has changed."""
        for folder in (self._created, self._deleted):
            for key in self._below(folder, prefix):
                self._hide(folder, key, 0)

    def _below(self, folder: Path, prefix: str) -> set[str]:
        return {key for key in map(unquote, os.listdir(folder)) if key.startswith(prefix)}

    def _count_list(self, folder: Path, prefix: str) -> set[str]:
        """The keys of changes that are not shown yet, each with one list less to go."""
        keys = self._below(folder, prefix)
        for key in keys:
            with suppress(OSError, ValueError):  # by another process
                left = int((folder / quote(key, safe="")).read_text()) - 1
                self._hide(folder, key, left)
        return keys

    def _hide(self, folder: Path, key: str, num_lists: int) -> None:
        path = folder / quote(key, safe="")
        path.write_text(str(num_lists)) if num_lists > 0 else path.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        with suppress(FileNotFoundError):
            return self._file(key).stat().st_size - _IDENTITY_BYTES
        return None

    def identity(self, key: str) -> str | None:
        with suppress(FileNotFoundError), self._file(key).open("rb") as file:
            return file.read(_IDENTITY_BYTES).decode()
        return None

    def read(self, key: str, start: int, length: int) -> bytes:
        with self._file(key).open("rb") as file:
            file.seek(_IDENTITY_BYTES + start)
            return file.read(length)

    def read_json(self, key: str) -> dict[str, Any]:
        size = self.size(key)
        return json.loads(self.read(key, 0, size)) if size else {}

    def upload(self) -> "Upload":
        return Upload(self._parts / uuid4().hex)

    def put(self, key: str, upload: "Upload") -> None:
        """Complete an upload: the object appears, or is replaced, with all of its bytes."""
        upload.file.close()
        if self.size(key) is None:
            self._hide(self._created, key, int(os.environ.get(LAG, "0")))
            self._hide(self._deleted, key, 0)
        os.replace(upload.path, self._file(key))

    def put_bytes(self, key: str, data: bytes) -> None:
        upload = self.upload()
        upload.write(data)
        self.put(key, upload)

    def delete(self, key: str) -> None:
        if self.size(key) is not None:
            self._hide(self._deleted, key, int(os.environ.get(LAG, "0")))
            self._hide(self._created, key, 0)
            self._file(key).unlink()

    def index(self, folder: str) -> dict[str, list[str] | None]:
        """The checkpoints below a key: None, or the files that were begun of one that is not committed."""
        return self.read_json(f"{folder}/{INDEX}")

    def put_in_index(self, checkpoint: str, *files: str, is_whole: bool = False, is_gone: bool = False) -> None:
        """Change the index as a conditional put does, which is tried again when another process was first."""
        folder, _, name = checkpoint.rpartition("/")
        with (self._parts.parent / "index.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self.index(folder)
            index[name] = None if is_whole else [*(index.get(name) or ()), *files]
            if is_gone:
                del index[name]
            self.put_bytes(f"{folder}/{INDEX}", json.dumps(index).encode())

    def _file(self, key: str) -> Path:
        return self._root / quote(key, safe="")


class Upload:
    """Bytes that are no object yet."""

    def __init__(self, path: Path):
        self.path, self.file = path, path.open("xb")
        self.file.write(uuid4().hex.encode())

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)

    def abort(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)


def key_of(location: Location) -> str:
    return location.text.removeprefix(f"{SCHEME}://").rstrip("/")


class PretendStore:
    """Reads the objects below a location."""

    def __init__(self, location: Location):
        self.location = location
        self._objects, self._prefix = Objects(), f"{key_of(location)}/"
        self._mirror: Path | None = None
        self.num_read: Counter[str] = Counter()  # bytes by name

    def names(self, folder: str = "") -> list[str]:
        start = f"{folder.rstrip('/')}/" if folder else ""
        below = [name.removeprefix(start) for name in self.walk() if name.startswith(start)]
        below += [f"{name}/" for name in self._objects.index(f"{self._prefix}{start}"[:-1])]
        return sorted({head + slash for head, slash, _ in (name.partition("/") for name in below)})

    def walk(self) -> list[str]:
        names = {key.removeprefix(self._prefix) for key in self._objects.listed(self._prefix)}
        names |= {MANIFEST, *self._objects.read_json(self._prefix + MANIFEST).get("files", ())}
        return sorted(name for name in names if not name.endswith((UNFINISHED, INDEX)) and self._is_there(name))

    def _is_there(self, name: str) -> bool:
        return self._objects.size(self._prefix + name) is not None

    def size(self, name: str) -> int:
        size = self._objects.size(self._prefix + name)
        if size is None:
            raise MissingFile(self.location / name, hint="the checkpoint is incomplete")
        return size

    def identity(self, name: str) -> tuple[str | int, ...]:
        identity = self._objects.identity(self._prefix + name)
        if identity is None:
            raise MissingFile(self.location / name)
        return (identity,)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.size(name)
        self.num_read[name] += len(buffer)
        data = self._objects.read(self._prefix + name, start, len(buffer))
        if len(data) < len(buffer):
            end = start + len(data)
            raise CheckpointError(f"{self.location / name}: the file ends at byte {end}, in the middle of the data")
        buffer[:] = data

    def local(self, names: Iterable[str] = ()) -> Path:
        self._mirror = local_copies(self, names, self._mirror)
        return self._mirror

    def close(self) -> None:
        pass


def open_pretend(location: Location) -> tuple[Store, str]:
    if Objects().size(key_of(location)) is not None:
        return PretendStore(location.parent), location.name
    store = PretendStore(location)
    if not store.names():
        raise Missing(f"{location}: no such object")
    return store, ""


class UnfinishedStore(PretendStore):
    """Reads an output before its marker is there."""

    def __init__(self, location: Location, marker: str):
        super().__init__(location)
        self._marker = marker

    def size(self, name: str) -> int:
        return super().size(self._held(name))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        super().read_into(self._held(name), start, buffer)

    def _held(self, name: str) -> str:
        return name + UNFINISHED if name == self._marker else name


class PretendOutput:
    """Objects below a location; the last one of `files` appears when the output is committed."""

    offset_files = None

    def __init__(self, location: Location, marker: str, *, is_file: bool = False, is_shared: bool = False):
        """`is_shared`: other processes read what will be the marker, as another object, before the commit."""
        self._location, self._marker, self._is_file, self._is_shared = location, marker, is_file, is_shared
        self._folder: Path | None = None
        self._objects, self._held = Objects(), dict[str, Upload]()
        self._names: set[str] = set()

    @property
    def folder(self) -> Path:
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="titan-pretend-"))
        return self._folder

    @property
    def store(self) -> PretendStore:
        return UnfinishedStore(self._location, self._marker)

    def _key(self, name: str) -> str:
        if self._is_shared and name == self._marker:
            name += UNFINISHED
        return key_of(self._location) if self._is_file else f"{key_of(self._location)}/{name}"

    @contextmanager
    def create(self, name: str) -> Iterator[Upload]:
        upload = self._objects.upload()
        try:
            yield upload
        except BaseException:
            upload.abort()
            raise
        self._names.add(name)
        if name == self._marker and not self._is_shared:
            self._held[name] = upload
        elif self._is_file:
            upload.abort()
        else:
            if self._is_shared:
                self._objects.put_in_index(key_of(self._location), name)
            self._objects.put(self._key(name), upload)

    def identity(self, name: str) -> tuple[str | int, ...] | None:
        identity = self._held[name].path.name if name in self._held else self._objects.identity(self._key(name))
        return None if identity is None else (identity,)

    def add_small_files(self) -> list[str]:
        if self._folder is None:
            return []
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        for name, path in sorted(paths.items()):
            self.replace(name, path.read_bytes())
        return [*paths]

    def replace(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def commit(self, *, overwrite: bool, marks: Sequence[str]) -> None:
        key = key_of(self._location)
        while self._held:
            name, upload = self._held.popitem()
            self._objects.put(self._key(name), upload)
        if self._is_shared:
            unfinished = self._key(self._marker)
            data = self._objects.read(unfinished, 0, self._objects.size(unfinished))
            self._objects.put_bytes(f"{key}/{self._marker}", data)
            self._objects.delete(unfinished)
        if not self._is_file:
            self._objects.put_in_index(key, is_whole=True)
        self.abort()

    def abort(self) -> None:
        """Forget what is no object yet."""
        for upload in self._held.values():
            upload.abort()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def discard(self) -> None:
        self.abort()
        for name in self._names:
            self._objects.delete(self._key(name))
        if self._is_shared:
            remove(self._location)


class PretendOutputs:
    """Makes the outputs. A file beside the objects, which they do not need, is the journal and the lock."""

    only_appends = True

    def check(self, location: Location, *, overwrite: bool, marks: Sequence[str]) -> None:
        names = PretendStore(location).walk()
        if Objects().size(key_of(location)) is not None and not overwrite:
            raise CheckpointError(f"{location}: exists already", hint="nothing was written", tries=["--overwrite"])
        if not names or (_journal_of(location).exists() and MANIFEST not in names):  # left by a killed attempt
            return
        if not any(Path(name).match(mark) for name in names for mark in marks):
            raise CheckpointError(
                f"{location}: exists already and is not what would be written; it is not replaced",
                hint="give a new folder, or remove this one yourself",
            )
        if not overwrite:
            raise CheckpointError(f"{location}: exists already", hint="nothing was written", tries=["--overwrite"])

    def free_bytes(self, location: Location) -> int:
        return 1 << 60

    def bytes_left_behind(self, location: Location) -> int:
        return 0

    @contextmanager
    def claim(
        self, location: Location, *, files: Mapping[str, int], is_file: bool, fingerprint: str | None, resume: bool
    ) -> Iterator[Claimed]:
        *_, marker = files
        path = _journal_of(location)
        try:
            journal = Journal(path)
        except CheckpointError as error:
            raise CheckpointError(f"{location}: another conversion is writing it now") from error
        output = PretendOutput(location, marker, is_file=is_file)
        try:
            header = {"plan": fingerprint, "destination": location.name}
            if not (resume and fingerprint and journal.load(header)):
                remove(location)
                journal.start(header)
            yield Claimed(output, journal, ())
            path.unlink()
        except BaseException as error:
            if resume and can_resume(error):
                output.abort()
            else:
                output.discard()
                path.unlink()
            raise
        finally:
            journal.close()

    def prepare(self, location: Location) -> str:
        remove(location)
        return ""

    def shared(self, location: Location, identifier: str, *, marker: str) -> PretendOutput:
        return PretendOutput(location, marker, is_shared=True)

    def existing(self, location: Location) -> PretendOutput:
        return PretendOutput(location, "")

    @contextmanager
    def lock(self, folder: Location, name: str, *, owner: str, patience_secs: float) -> Iterator[None]:
        key, deadline, objects = key_of(folder / name), time.monotonic() + patience_secs, Objects()
        while True:
            with suppress(CheckpointError):
                journal = Journal(_journal_of(folder / name))
                break
            if time.monotonic() > deadline:
                raise Locked(objects.read(key, 0, objects.size(key) or 0).decode())
            time.sleep(0.1)
        try:
            objects.put_bytes(key, owner.encode())
            yield
        finally:
            journal.close()

    def remove(self, location: Location) -> None:
        remove(location)

    def sweep(self, folder: Location) -> None:
        for name, files in Objects().index(key_of(folder)).items():
            if files is None:
                continue
            if all(Objects().size(key_of(folder / name / last)) is not None for last in (MANIFEST, DCP_METADATA)):
                Objects().put_in_index(key_of(folder / name), is_whole=True)
            else:
                remove(folder / name)


def remove(location: Location) -> None:
    """Delete the objects of a checkpoint, the manifest last: until then it is one of which files are missing."""
    objects, key = Objects(), key_of(location)
    index = objects.index(key_of(location.parent))
    names = {*PretendStore(location).walk(), *(index.get(location.name) or ()), DCP_METADATA + UNFINISHED}
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        objects.delete(f"{key}/{name}")
    if location.name in index:
        objects.put_in_index(key, is_gone=True)


def _journal_of(location: Location) -> Path:
    folder = Path(os.environ[ROOT]) / "journals"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / quote(key_of(location), safe="")


register_store(SCHEME, open_pretend)  # at import, as a module of `--import` does
register_outputs(SCHEME, PretendOutputs())
