"""The destination of an output: a folder, or one file. Both are checked first, and appear complete or not at all."""

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, TitanError
from converters.common.names import TEMPORARY_PREFIX
from converters.containers import torch_file
from converters.containers.registry import WEIGHT_SUFFIXES
from converters.conversion.execute import Execution, check_places, execute
from converters.conversion.remarks import describe_left_files, describe_lone_file, describe_tokenizer
from converters.formats.base import Format
from converters.source.weights import NativeWeights
from converters.store.replace_file import fsync
from converters.tokenizers.assets import tokenizer_remark


@dataclass(frozen=True, slots=True)
class FolderDestination:
    """A folder of weights, manifest and small files."""

    path: Path
    format: Format

    @property
    def work_folder(self) -> Path:
        """The folder that `execute` makes."""
        return self.path

    def check(self, src: Path, *, overwrite: bool) -> None:
        """Raise CheckpointError where the output may not be written."""
        check_places(src, self.path, overwrite=overwrite)

    def carried_files(self, weights: NativeWeights) -> Collection[Path]:
        """The files that are copied along with the weights."""
        return list(weights.info.assets.values())

    def remarks(self, src: Path, weights: NativeWeights) -> list[str]:
        """What happens to the files that are not weights, where a user should know."""
        info = weights.info
        is_meta = weights.catalog.container == "meta"
        found = tokenizer_remark(info.assets, to=self.format.name, vocab_size=info.args.vocab_size, of_meta=is_meta)
        left_files = describe_left_files(weights.catalog, info) if src.is_dir() else ""
        return [found, describe_tokenizer(info), *info.remarks, left_files]

    def write(self, *, overwrite: bool, **plan: Any) -> Execution:
        """Carry out a plan; the arguments are those of `execute`."""
        return execute(self.path, overwrite=overwrite, **plan)


@dataclass(frozen=True, slots=True)
class FileDestination:
    """A single file of weights: written in a temporary folder like any output, then renamed to its place."""

    path: Path

    @property
    def work_folder(self) -> Path:
        return self.path.absolute().parent / f"{TEMPORARY_PREFIX}{self.path.name}"

    def check(self, src: Path, *, overwrite: bool) -> None:
        """Raise CheckpointError where the file may not be written; only a torch file of weights is replaced."""
        dst = self.path
        if not dst.exists() or dst.is_symlink() or src.resolve() == dst.resolve():
            check_places(src, dst, overwrite=overwrite)
            return
        if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
            raise CheckpointError(f"{dst} is a part of the source", hint="write to a file outside of the source")
        if not dst.is_file():
            raise CheckpointError(
                f"{dst}: exists and is not a file", hint="a DST with this suffix is the file to write"
            )
        if problem := _not_weights(dst):
            raise CheckpointError(
                f"{dst}: exists already and is {problem}; it is not replaced",
                hint="give a new name, or remove this one yourself",
            )
        if not overwrite:
            raise CheckpointError(f"{dst}: exists already", hint="nothing was written", tries=["--overwrite"])

    def carried_files(self, weights: NativeWeights) -> Collection[Path]:
        return ()

    def remarks(self, src: Path, weights: NativeWeights) -> list[str]:
        return [
            "the file does not describe its model: commands that read it need --model-from",
            describe_lone_file(weights.info),
        ]

    def write(self, *, overwrite: bool, **plan: Any) -> Execution:
        """Carry out a plan whose target is one file."""
        folder = self.work_folder
        (name,) = plan["target"].file_bytes
        try:
            done = execute(folder, overwrite=True, **plan | {"write_small_files": lambda folder: []})
        except TitanError as error:
            message = error.message.replace(str(folder), str(self.path))
            raise type(error)(message, hint=error.hint, tries=error.tries) from error
        try:
            self._move(folder / name, overwrite=overwrite)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return done

    def _move(self, made: Path, *, overwrite: bool) -> None:
        if overwrite:
            os.replace(made, self.path)
        else:
            try:
                os.link(made, self.path)  # unlike a rename, fails where the file has appeared meanwhile
            except FileExistsError as error:
                raise CheckpointError(
                    f"{self.path}: appeared while it was being made", hint="another job wrote there"
                ) from error
            except OSError:  # a file system without links
                os.rename(made, self.path)
        fsync(self.path.parent)


Destination = FolderDestination | FileDestination


def destination_of(dst: Path, format: Format) -> Destination:
    """The destination that a path means for a format. Raises CheckpointError for a folder with the name of a file."""
    if dst.suffix in format.file_suffixes:
        return FileDestination(dst)
    if dst.suffix.lower() in WEIGHT_SUFFIXES:
        raise CheckpointError(
            f"{dst}: a folder would be made, and this is the name of a file",
            tries=[str(dst.with_suffix(suffix)) for suffix in ("", *sorted(format.file_suffixes))],
        )
    return FolderDestination(dst, format)


def _not_weights(path: Path) -> str:
    """What a file is that is no torch file of weights; "" for one that is."""
    try:
        torch_file.read_catalog(path)
    except TitanError as error:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        return f"a torch file without weights ({error.message})" if is_zip else "no torch file"
    return ""
