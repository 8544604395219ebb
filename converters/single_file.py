"""An output that is one file: made in a folder beside its place as any other, then moved out by one rename."""

import os
import shutil
from pathlib import Path
from typing import Any

from converters.commit import fsync
from converters.containers import torch_file
from converters.errors import CheckpointError, TitanError
from converters.execute import Execution, check_places, execute
from converters.names import TEMPORARY_PREFIX


def check_file_place(src: Path, dst: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError where the file `dst` may not be written; only a torch file is ever replaced."""
    if not dst.exists() or dst.is_symlink() or src.resolve() == dst.resolve():
        check_places(src, dst, overwrite=overwrite)
        return
    if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
        raise CheckpointError(f"{dst} is a part of the source", hint="write to a file beside the source")
    if not dst.is_file():
        raise CheckpointError(f"{dst}: exists and is not a file", hint="a DST with this suffix is the file to write")
    if problem := _no_weights(dst):
        raise CheckpointError(
            f"{dst}: exists already and is {problem}; it is not replaced",
            hint="give a new name, or remove this one yourself",
        )
    if not overwrite:
        raise CheckpointError(f"{dst}: exists already", hint="nothing was written", tries=["--overwrite"])


def execute_into_file(dst: Path, *, overwrite: bool, **plan: Any) -> Execution:
    """`execute` with a target of one file, which becomes `dst` itself; nothing is put beside it."""
    folder = folder_of(dst)
    (name,) = plan["target"].file_bytes
    try:
        done = execute(folder, overwrite=True, **plan | {"write_small_files": lambda folder: [], "carried": ()})
    except TitanError as error:
        message = error.message.replace(str(folder), str(dst))
        raise type(error)(message, hint=error.hint, tries=error.tries) from error
    try:
        _move(folder / name, dst, overwrite=overwrite)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done


def folder_of(dst: Path) -> Path:
    """Where the file `dst` is made."""
    return dst.absolute().parent / f"{TEMPORARY_PREFIX}{dst.name}"


def _move(made: Path, dst: Path, *, overwrite: bool) -> None:
    if overwrite:
        os.replace(made, dst)
    else:
        try:
            os.link(made, dst)  # unlike a rename, fails where somebody made one meanwhile
        except FileExistsError as error:
            raise CheckpointError(f"{dst}: appeared while it was being made", hint="another job wrote there") from error
        except OSError:  # a file system without links
            os.rename(made, dst)
    fsync(dst.parent)


def _no_weights(path: Path) -> str:
    """What a file is that is no torch file of weights; "" for one that is."""
    try:
        torch_file.read_catalog(path)
    except TitanError as error:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        return f"a torch file of something else than weights ({error.message})" if is_zip else "no torch file"
    return ""
