"""Local copies of the small files of a store that is no folder: config, tokenizer, index, manifest, `.metadata`."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from converters.common.errors import Missing
from converters.store.base import Store, read_bytes
from converters.store.location import Location

_NOT_COPIED = "not-copied"  # a name that does not exist


@cache
def _root() -> Path:
    """The folder of all copies, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="titan-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def local_copies(store: Store, names: Iterable[str], folder: Path | None) -> Path:
    """The folder for `Store.local`, with copies of these files; `folder`: what the last call for this store returned.

    All other files are links to nothing: who looks for their names finds them. Opening one raises FileNotFoundError,
    so a file that is to be read must be among `names`.
    """
    into = folder or _new_folder(store.location)
    for name in names:
        path = into / name
        if path.is_file():
            continue
        with suppress(Missing):  # as a file of a folder may be missing
            data = read_bytes(store, name)
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for name in store.names():
        path = into / name
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif not path.is_file() and not path.is_symlink():
            path.symlink_to(_NOT_COPIED)
    return into


def _new_folder(location: Location) -> Path:
    """An empty folder for local copies, whose path ends like the location, for messages."""
    parts = [part for part in str(location).split("/") if part not in ("", ".", "..")]
    folder = Path(tempfile.mkdtemp(dir=_root())).joinpath(*parts)
    folder.mkdir(parents=True)
    return folder
