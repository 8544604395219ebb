"""An object store in a folder: objects can be created and replaced as a whole, deleted, listed and read by ranges.

There is no rename, no link, no directory, no time and no writing at an offset. What the product sees of it is
`pretend://BUCKET/KEY`, and processes share it. An object is a file with 32 hex digits, its identity, before its bytes.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote
from uuid import uuid4

from converters.common.errors import CheckpointError
from converters.common.names import MANIFEST
from converters.store.base import Store, register_store
from converters.store.commit import CHECKPOINT_MARKS
from converters.store.journal import Journal
from converters.store.location import Location
from converters.store.mirror import copy_small_files, new_mirror
from converters.store.output import Claimed, Locked, can_resume
from converters.store.outputs import register_outputs
from converters.store.paths import NotAFile

SCHEME = "pretend"
ROOT = "TITAN_PRETEND_STORE"  # the environment variable that names the folder
UNFINISHED = ".unfinished"
_IDENTITY_BYTES = 32


class Objects:
    """The objects of the store, by key."""

    not_listed: ClassVar[set[str]] = set()  # by a list that lags

    def __init__(self) -> None:
        self._root = Path(os.environ[ROOT]) / "objects"
        self._parts = Path(os.environ[ROOT]) / "parts"
        for folder in (self._root, self._parts):
            folder.mkdir(parents=True, exist_ok=True)

    def keys(self, prefix: str) -> list[str]:
        keys = map(unquote, os.listdir(self._root))
        return sorted(key for key in keys if key.startswith(prefix) and key not in self.not_listed)

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

    def upload(self) -> "Upload":
        return Upload(self._parts / uuid4().hex)

    def put(self, key: str, upload: "Upload") -> None:
        """Complete an upload: the object appears, or is replaced, with all of its bytes."""
        upload.file.close()
        os.replace(upload.path, self._file(key))

    def delete(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

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
        return sorted({f"{head}/" if rest else head for head, rest in map(_first_part, below)})

    def walk(self) -> list[str]:
        return [key.removeprefix(self._prefix) for key in self._objects.keys(self._prefix)]

    def size(self, name: str) -> int:
        size = self._objects.size(self._prefix + name)
        if size is None:
            raise NotAFile(self.location / name, "missing", hint="the checkpoint is incomplete")
        return size

    def identity(self, name: str) -> tuple[str | int, ...]:
        identity = self._objects.identity(self._prefix + name)
        if identity is None:
            raise NotAFile(self.location / name, "missing")
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
        self._mirror = self._mirror or new_mirror(self.location)
        copy_small_files(self, names, self._mirror)
        return self._mirror

    def close(self) -> None:
        pass


def _first_part(name: str) -> tuple[str, str]:
    head, _, rest = name.partition("/")
    return head, rest


def open_pretend(location: Location) -> tuple[Store, str]:
    objects, key = Objects(), key_of(location)
    if objects.size(key) is not None:
        return PretendStore(location.parent), location.name
    if not objects.keys(f"{key}/"):
        raise CheckpointError(f"{location}: no such object")
    return PretendStore(location), ""


class UnfinishedStore(PretendStore):
    """Reads an output before its marker is there."""

    def __init__(self, location: Location, marker: str):
        super().__init__(location)
        self._marker = marker

    def walk(self) -> list[str]:
        return [name.removesuffix(UNFINISHED) for name in super().walk()]

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
        if name == self._marker and self._is_shared:
            self._objects.put(self._key(name + UNFINISHED), upload)
        elif name == self._marker:
            self._held[name] = upload
        elif self._is_file:
            upload.abort()
        else:
            self._objects.put(self._key(name), upload)

    def identity(self, name: str) -> tuple[str | int, ...] | None:
        identity = None if name == self._marker else self._objects.identity(self._key(name))
        return None if identity is None else (identity,)

    def add_small_files(self) -> None:
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            self.replace(path.relative_to(self.folder).as_posix(), path.read_bytes())

    def names(self) -> list[str]:
        below = () if self._is_file else self._objects.keys(self._key(""))
        names = self._names | {key.removeprefix(self._key("")) for key in below}
        return sorted(name for name in names if not name.endswith(UNFINISHED))

    def replace(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def commit(self, *, overwrite: bool) -> None:
        for name, upload in self._held.items():
            self._objects.put(self._key(name), upload)
        if self._is_shared:
            unfinished, upload = self._key(self._marker + UNFINISHED), self._objects.upload()
            upload.write(self._objects.read(unfinished, 0, self._objects.size(unfinished)))
            self._objects.put(self._key(self._marker), upload)
            self._objects.delete(unfinished)
        shutil.rmtree(self.folder)

    def abort(self) -> None:
        """Forget what is no object yet."""
        for upload in self._held.values():
            upload.abort()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def discard(self) -> None:
        self.abort()
        if self._is_shared:
            remove(self._location)
        for name in self._names:
            self._objects.delete(self._key(name))


class PretendOutputs:
    """Makes the outputs. A file beside the objects, which they do not need, is the journal and the lock."""

    only_appends = True

    def check(self, location: Location, *, overwrite: bool, marks: Sequence[str] = CHECKPOINT_MARKS) -> None:
        objects, key = Objects(), key_of(location)
        names = [each.removeprefix(f"{key}/") for each in objects.keys(f"{key}/")]
        if objects.size(key) is not None and not overwrite:
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

    def require_space(self, location: Location, num_bytes: int) -> int:
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

    def prepare(self, location: Location, identifier: str) -> None:
        remove(location)

    def shared(self, location: Location, identifier: str, *, marker: str) -> PretendOutput:
        return PretendOutput(location, marker, is_shared=True)

    @contextmanager
    def lock(self, folder: Location, name: str, *, owner: str, patience_secs: float) -> Iterator[None]:
        try:
            journal = Journal(_journal_of(folder / name))
        except CheckpointError as error:
            raise Locked(owner) from error
        try:
            yield
        finally:
            journal.close()

    def names(self, folder: Location) -> list[str]:
        return PretendStore(folder).names()

    def is_present(self, location: Location) -> bool:
        return bool(Objects().keys(key_of(location)))

    def is_no_folder(self, location: Location) -> bool:
        return Objects().size(key_of(location)) is not None

    def free_bytes(self, location: Location) -> int:
        return 1 << 60

    def remove(self, location: Location) -> None:
        remove(location)

    def sweep(self, folder: Location) -> None:
        for name in self.names(folder):
            if name.endswith("/") and MANIFEST not in self.names(folder / name[:-1]):
                remove(folder / name[:-1])


def remove(location: Location) -> None:
    """Delete the objects of a checkpoint, so that it is none at once."""
    objects, prefix = Objects(), f"{key_of(location)}/"
    keys = objects.keys(prefix)
    for key in sorted(keys, key=lambda key: key != prefix + MANIFEST):
        objects.delete(key)


def _journal_of(location: Location) -> Path:
    folder = Path(os.environ[ROOT]) / "journals"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / quote(key_of(location), safe="")


def register() -> None:
    register_store(SCHEME, open_pretend)
    register_outputs(SCHEME, PretendOutputs())
