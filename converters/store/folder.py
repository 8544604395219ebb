"""The store of a folder on this machine."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from converters.common.errors import CheckpointError, Missing
from converters.store.commit import find_complete
from converters.store.hf_cache import snapshot_of
from converters.store.hub_names import download_command
from converters.store.location import Location
from converters.store.open_files import OpenFiles
from converters.store.paths import NotAFile, checked_file_size, is_folder, refuse_links_out


class FolderStore:
    """The files below a folder. Links out of it, devices and pipes are refused (paths.checked_file_size)."""

    def __init__(self, root: Path):
        self._root = root
        self._files = OpenFiles(root)

    @property
    def location(self) -> Location:
        return Location(str(self._root))

    def names(self, folder: str = "") -> list[str]:
        with os.scandir(self._root / folder) as entries:
            return sorted(f"{entry.name}/" if is_folder(entry) else entry.name for entry in entries)

    def walk(self) -> list[str]:
        found = [Path(folder, name) for folder, _, names in os.walk(self._root) for name in names]
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def size(self, name: str) -> int:
        return checked_file_size(self._root, name)

    def identity(self, name: str) -> tuple[str | int, ...]:
        """Size and time of the last change."""
        path = self._root / name
        try:
            status = os.stat(path)
        except OSError as error:
            raise NotAFile(path, error.strerror) from error
        return status.st_size, status.st_mtime_ns

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        file = self._files.get(name)
        try:
            position = os.preadv(file.descriptor, [buffer], start)
            while position < len(buffer):
                num_read = os.preadv(file.descriptor, [buffer[position:]], start + position)
                if num_read == 0:
                    end = start + position
                    raise CheckpointError(
                        f"{self._root / name}: the file ends at byte {end}, in the middle of the data"
                    )
                position += num_read
        except OSError as error:
            raise CheckpointError(f"{self._root / name}: cannot be read ({error.strerror})") from error

    def local(self, names: Iterable[str] = ()) -> Path:
        """The folder itself: nothing is copied."""
        return self._root

    def close(self) -> None:
        self._files.close()


def open_folder(path: Path) -> tuple[FolderStore, str]:
    """The store of a folder, and "" or, if `path` is a file, its name.

    It is the snapshot of a repository in the Hugging Face cache, and the old folder if its replacement was cut off.
    Raises Missing if there is nothing at `path`, with what was probably meant.
    """
    path = snapshot_of(find_complete(path))
    if path.is_dir():
        return FolderStore(path), ""
    if path.is_file():
        path = _resolved_if_link(path)
        return FolderStore(path.parent), path.name
    if path.exists():
        raise CheckpointError(f"{path}: neither a file nor a folder")
    if path.is_symlink():
        raise Missing(f"{path}: a broken link")
    near = get_close_matches(path.name, [p.name for p in path.parent.iterdir()], 1) if path.parent.is_dir() else []
    tries = [str(path.parent / name) for name in near] + download_command(path)
    raise Missing(f"{path}: no such file or folder", tries=tries)


def _resolved_if_link(path: Path) -> Path:
    """The target of a link that the user has named: it may lead anywhere. In the HF cache, the link itself."""
    try:
        refuse_links_out(path.parent, [path])
    except CheckpointError:
        return path.resolve()
    return path  # in the HF cache the files that describe the model are beside the link
