"""File names that come from inside a checkpoint: they may name a regular file of its folder, nothing else."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from converters.containers.hf_cache import is_blob_of
from converters.errors import CheckpointError, list_offenders


def checked_file_name(name: object, *, what: str) -> str:
    """`name` if it is one plain file name. Separators, `..`, drive letters, `~` and control characters are refused."""
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not name.startswith("~")
        and not any(c in name for c in "/\\:")
        and name.isprintable()
    )
    if not plain:
        raise CheckpointError(
            f"{what}: names the file {str(name)[:200]!r}, which may lie outside the checkpoint's folder",
            hint="files of a checkpoint lie beside each other, under plain names",
        )
    return name


def checked_file_size(folder: Path, name: str) -> int:
    """The size of a regular file of `folder`. Links may lead where `refuse_links_out` says; no device, no pipe."""
    path = folder / name
    try:
        if path.is_symlink():
            refuse_links_out(folder, [path])
        status = os.stat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing", hint="the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return status.st_size


def refuse_links_out(folder: Path, paths: Iterable[Path]) -> None:
    """Raise CheckpointError, naming all of them, where files of `folder` lie outside of it by way of links.

    A checkpoint that somebody has packed with such links would have any file of the reader's read, and copied along
    with the tokenizer. Links to the folder itself (`latest`) are the user's own and followed; so are those of a
    snapshot in the Hugging Face cache, which lead to the blobs of its repository.
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
            f"{folder}: links that lead nowhere:{list_offenders(nowhere)}",
            hint="what they point to was moved or not copied; copy the folder again where the links work (cp -rL)",
        )
    places = {target.parent for name, target in leading_out.items() if target.name == name}
    raise CheckpointError(
        f"{folder}: files that are links to outside of the checkpoint:"
        + list_offenders([f"{name} → {target}" for name, target in leading_out.items()]),
        hint="who made such a folder can have any file of yours read; if it was you, give the folder of the files, or a"
        " copy that holds them",
        tries=[*(str(place) for place in list(places)[:1] if len(places) == 1), f"cp -rL {folder} {folder}-copy"],
    )


def linked_files(folder: Path) -> list[Path]:
    """What in `folder` is a link, but no link to another folder."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_symlink() and not _is_folder(entry))


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False
