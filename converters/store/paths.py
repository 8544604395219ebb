"""Check file names that a checkpoint contains: they may name only regular files of its folder."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from converters.common.errors import CheckpointError, Missing, list_offenders
from converters.store.hf_cache import is_blob_of


class NotAFile(CheckpointError):
    """A file of a checkpoint is missing or cannot be looked at, or something else has its name."""

    def __init__(self, place: object, reason: str | None, *, hint: str = ""):
        super().__init__(f"{place}: {reason}", hint=hint)
        self.reason = reason


class MissingFile(NotAFile, Missing):
    """A file of a checkpoint is missing."""

    def __init__(self, place: object, *, hint: str = ""):
        super().__init__(place, "missing", hint=hint)


def checked_file_name(name: object, *, what: str) -> str:
    """`name` if it is one plain file name. Separators, `..`, drive letters, `~` and control characters are refused."""
    is_plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not name.startswith("~")
        and not any(c in name for c in "/\\:")
        and name.isprintable()
    )
    if not isinstance(name, str) or not is_plain:
        raise CheckpointError(
            f"{what}: names the file {str(name)[:200]!r}, which may lie outside the checkpoint's folder",
            hint="files of a checkpoint are in one folder, under plain names",
        )
    return name


def checked_file_size(folder: Path, name: str) -> int:
    """The size of a regular file of `folder`. Links must satisfy `refuse_links_out`; devices and pipes are refused."""
    path = folder / name
    try:
        if path.is_symlink():
            refuse_links_out(folder, [path])
        status = os.stat(path)
    except FileNotFoundError:
        raise MissingFile(path, hint="the checkpoint is incomplete") from None
    except OSError as error:
        raise NotAFile(path, error.strerror) from error
    if not stat.S_ISREG(status.st_mode):
        raise NotAFile(path, "not a regular file")
    return status.st_size


def refuse_links_out(folder: Path, paths: Iterable[Path]) -> None:
    """Raise CheckpointError, naming all of them, if links in `folder` lead to files outside of it.

    With such links a malicious checkpoint could have any file of the reader read, and copied along with the tokenizer.
    A link to the folder itself (`latest`) is the user's own and followed; so are those of a snapshot in the Hugging
    Face cache, which lead to the blobs of its repository.
    """
    home = Path(os.path.realpath(folder))
    leading_out = {}
    for path in paths:
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(home) and not is_blob_of(target, home):
            leading_out[str(path.relative_to(folder))] = target
    if not leading_out:
        return
    if nowhere := [f"{name} → {target}" for name, target in leading_out.items() if not target.exists()]:
        raise CheckpointError(
            f"{folder}: broken links:{list_offenders(nowhere)}",
            hint="their targets were moved or not copied; copy the folder again where the links work (cp -rL)",
        )
    places = {target.parent for name, target in leading_out.items() if target.name == name}
    raise CheckpointError(
        f"{folder}: files that are links to outside of the checkpoint:"
        + list_offenders([f"{name} → {target}" for name, target in leading_out.items()]),
        hint="such a folder could have any file of yours read; if it is your own, give the folder of the files, or a"
        " copy with them",
        tries=[
            *(str(place) for place in list(places)[:1] if len(places) == 1),
            f"cp -rL {folder} {folder}-copy",
        ],
    )


def refuse_listed_links(folder: Path, names: Iterable[str]) -> None:
    """`refuse_links_out` for the files of a list, which may be in folders of `folder`, or be links."""
    paths = [folder / name for name in names]
    refuse_links_out(folder, [path for path in paths if path.parent != folder or path.is_symlink()])


def linked_files(folder: Path) -> list[Path]:
    """The links in `folder`, except those to folders."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_symlink() and not is_folder(entry))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of a folder is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a circle of links
        return False
