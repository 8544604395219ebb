"""Small files on this machine, such as those below `Store.local`: what there is, and what is in it."""

import filecmp
import os
import shutil
from pathlib import Path
from typing import TextIO


def exists(path: Path) -> bool:
    return path.exists()


def is_file(path: Path) -> bool:
    return path.is_file()


def is_folder(path: Path) -> bool:
    return path.is_dir()


def is_link(path: Path) -> bool:
    return path.is_symlink()


def target_of(path: Path) -> str:
    """What a link names; "" for anything else."""
    return os.readlink(path) if path.is_symlink() else ""


def names_in(folder: Path) -> list[str]:
    """The names of files and folders in a folder, sorted; none if it is no folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def size(path: Path) -> int:
    return path.stat().st_size


def stamp(path: Path) -> tuple[int, int, int]:
    """Size, time and inode of a file: another content has another one."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_bytes(path: Path) -> bytes:
    return path.read_bytes()


def have_same_bytes(path: Path, other: Path) -> bool:
    return filecmp.cmp(path, other, shallow=False)


def read_start(path: Path, most_bytes: int) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as file:
        return file.read(most_bytes)


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def open_text(path: Path) -> TextIO:
    return path.open(encoding="utf-8")


def new_text(path: Path) -> TextIO:
    """A file to write text to, in a folder that is created if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    with new_text(path) as file:
        file.write(text)


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes of a file into a folder, which is created if it does not exist."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
