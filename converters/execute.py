"""Carry out a plan: copy into a temporary folder, add the small files, write the manifest last, move it into place."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path

from converters.catalog import TensorSource
from converters.commit import check_destination, require_space, staged
from converters.copy import RowNumbers, copy_tensors
from converters.dtypes import itemsize
from converters.errors import CheckpointError
from converters.formats.target import Target
from converters.manifest import TensorSum, write_manifest
from converters.source_check import Vouched

Progress = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]  # (total bytes, what) → advance(bytes)
_SMALL_FILES_BYTES = 64 * 1024**2  # room for tokenizer, configs and manifest


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of it: tensors with values that are no numbers, and the small files that were written."""

    non_finite: Mapping[str, int]
    other_files: list[str]


def no_progress(total_bytes: int, what: str) -> AbstractContextManager[Callable[[int], None]]:
    """A Progress that shows nothing."""
    return nullcontext(lambda num_bytes: None)


def check_places(src: Path, dst: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError where `dst` may not be written: it exists, or replacing it would take `src` away."""
    source, destination = src.resolve(), dst.resolve()
    if source == destination:
        raise CheckpointError(f"{dst} is the source itself", hint="write to a folder beside it")
    if source.is_relative_to(destination) or (destination.is_relative_to(source) and source.is_dir()):
        raise CheckpointError(f"{src} and {dst} lie in each other", hint="write to a folder beside the source")
    check_destination(dst, overwrite=overwrite)  # last: its advice, --overwrite, must not lead to one of the above


def execute(
    dst: Path,
    *,
    source: TensorSource,
    target: Target,
    casts: Mapping[str, str],
    write_small_files: Callable[[Path], list[str]],
    native_rows: RowNumbers | None = None,
    vouched: Vouched | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Execution:
    """Fill `target` from `source` in a folder that becomes `dst` when everything went well, and vanishes otherwise.

    `vouched`: what the values must be as they are read; another value is an error, and nothing is written.
    """
    require_room(dst, target)
    try:
        with staged(dst, overwrite=overwrite) as folder:
            data_bytes = sum(prod(info.shape) * itemsize(info.dtype) for info in target.tensors.values())
            with progress(data_bytes, "copying") as advance:
                copied = copy_tensors(
                    source,
                    target,
                    folder,
                    casts=casts,
                    native_rows=native_rows,
                    check_source=vouched.check if vouched else None,
                    on_bytes=advance,
                )
            files = target.finish(folder, copied.crc32)
            other_files = write_small_files(folder)
            tensors = {n: TensorSum(info.dtype, info.shape, copied.digests[n]) for n, info in target.tensors.items()}
            write_manifest(folder, tensors=tensors, files=files)
    except OSError as error:  # the disk filled up or went away; what was written is removed already
        raise CheckpointError(
            f"cannot write {dst}: {error.strerror or error}", hint="nothing of it was left behind"
        ) from error
    return Execution(copied.non_finite, other_files)


def require_room(dst: Path, target: Target) -> None:
    """Raise CheckpointError where the disk of `dst` has no room for the output."""
    require_space(dst, target.total_bytes + _SMALL_FILES_BYTES)
