"""The protocol of a store: reads the files of a checkpoint, wherever they are. Stores of URIs are registered here."""

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from converters.common.errors import Missing, UnsupportedError
from converters.common.extensions import ExtensionError, check_call, check_name, check_protocol, where_defined
from converters.store.folder import open_folder
from converters.store.location import SCHEME, Location


class Store(Protocol):
    """The files below one location, by name; names of files in folders have a `/`. Threads may read at the same time.

    Functions raise Missing (paths.MissingFile) if the file is missing, and another CheckpointError, with its place, if
    it cannot be read or the store cannot be asked: then nothing is known of the file.
    """

    @property
    def location(self) -> Location:
        """The folder of the files, as errors show it."""

    def names(self, folder: str = "") -> list[str]:
        """The names of the files in a folder and, with a `/` at the end, of the folders in it, sorted.

        Checkpoints that outputs have committed or removed show at once: a store whose lists lag keeps its own record.
        """

    def walk(self) -> list[str]:
        """The names of all files below the location, in its folders, too, sorted."""

    def size(self, name: str) -> int:
        """The size of a file in bytes. Raises paths.NotAFile for anything but a regular file of this checkpoint."""

    def identity(self, name: str) -> tuple[str | int, ...]:
        """What tells that a file was replaced: another object has another identity."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill the whole buffer with a file's bytes from `start` on."""

    def local(self, names: Iterable[str] = ()) -> Path:
        """A folder of this machine that has those of these files, which are small, that there are; later calls add to
        the same folder.
        """

    def close(self) -> None:
        """Close what is open. Reading opens it again."""


Opener = Callable[[Location], tuple[Store, str]]  # the store, and the name of a file in it if the location is a file
_OPENERS: dict[str, Opener] = {}


def register_store(scheme: str, opener: Opener) -> None:
    """Read locations `scheme://…` with the store that `opener` returns.

    `opener` gets the Location and returns the store of a folder and "", or the store of a file's folder and its name.
    It raises Missing if there is nothing at the location, and another CheckpointError if it cannot know.
    """
    check_name("store", scheme, _OPENERS, pattern=SCHEME)
    check_call(opener, ["location"], f"the opener of {scheme}://")
    _OPENERS[scheme] = opener


def open_store(location: Location) -> tuple[Store, str]:
    """The store of a checkpoint, and the name of the file in it if the location is a file, else "".

    Raises UnsupportedError if nothing is registered for the scheme of a URI.
    """
    if not location.scheme:
        return open_folder(location.path)
    opener = _OPENERS.get(location.scheme)
    if opener is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_OPENERS))
        raise UnsupportedError(
            f"{location}: {location.scheme}:// cannot be read",
            hint=f"known: paths, {known}" if known else "give a path; a module of your own can register a store",
        )
    opened = opener(location)
    if not (isinstance(opened, tuple) and len(opened) == 2 and isinstance(opened[1], str)):
        what = f"{where_defined(opener)}: the opener of {location.scheme}://"
        raise ExtensionError(f"{what} returned {opened!r:.80}, not a Store and a str")
    check_protocol(opened[0], Store, f"the store of {location.scheme}://")
    return opened


def is_present(location: Location) -> bool:
    """Whether there is a folder or a file."""
    try:
        open_store(location)
    except Missing:
        return False
    except OSError as error:
        if error.errno != errno.ESTALE:  # NFS answers so for a folder that was just made
            raise
        return False
    return True


def is_file_at(location: Location) -> bool:
    """Whether there is a file, and no folder."""
    return is_present(location) and open_store(location)[1] != ""


def names_at(location: Location) -> list[str]:
    """The names in a folder, as `Store.names` gives them; none if it does not exist, or is a file."""
    try:
        store, file = open_store(location)
    except Missing:
        return []
    return [] if file else store.names()


def text_at(location: Location) -> str:
    """The text of a small file; "" if there is none."""
    try:
        store, file = open_store(location)
    except Missing:
        return ""
    return read_bytes(store, file).decode(errors="replace") if file else ""


def reading_part(store: Store, name: str, start: int, size: int) -> Callable[[int, int], bytes]:
    """The function that reads `(offset, length)` of a part of a file; it returns less beyond the end of the part."""

    def read_at(offset: int, length: int) -> bytes:
        return read_bytes(store, name, start + offset, max(0, min(length, size - offset)))

    return read_at


def read_bytes(store: Store, name: str, start: int = 0, length: int | None = None) -> bytes:
    """Bytes of a file: `length` from `start` on, or all to its end."""
    buffer = bytearray(store.size(name) - start if length is None else length)
    store.read_into(name, start, memoryview(buffer))
    return bytes(buffer)
