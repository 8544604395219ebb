"""Carry out a plan: copy into a temporary folder, add the small files, write the manifest last, move it into place."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from converters.common.box import TensorSource
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.containers.target import Target
from converters.conversion.needs import require_room
from converters.engine.copy import BLOCK_BYTES, DEFAULT_WORKERS, UNIT_BYTES, copy_tensors
from converters.engine.journal import reading_order
from converters.integrity.source_check import Vouched
from converters.integrity.staging import RESUME_HINT, staged_output
from converters.store.commit import check_destination
from converters.store.manifest import TensorSum, write_manifest
from converters.views.encoder import Encoder
from converters.views.expressions import RowNumbers

Progress = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]  # (total bytes, what) → advance(bytes)


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of a plan: non-finite values by tensor, and the small files that were written."""

    non_finite: Mapping[str, int]
    other_files: list[str]
    relative_error: Mapping[str, float] = field(default_factory=dict)  # the largest error of a cast, by tensor
    remarks: tuple[str, ...] = ()  # about what an earlier attempt left
    resumed_bytes: int = 0  # of the data: written by an earlier attempt, and read back
    num_moved: int = 0  # scales of quantized weights that differ from known ones


def no_progress(total_bytes: int, what: str) -> AbstractContextManager[Callable[[int], None]]:
    """A Progress that shows nothing."""
    return nullcontext(lambda num_bytes: None)


def check_places(src: Path, dst: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError where `dst` may not be written: it exists, or replacing it would delete `src`."""
    source, destination = src.resolve(), dst.resolve()
    if source == destination:
        raise CheckpointError(f"{dst} is the source itself", hint="write to another folder")
    if source.is_relative_to(destination) or (destination.is_relative_to(source) and source.is_dir()):
        raise CheckpointError(f"{src} and {dst}: one is inside the other", hint="write to a folder outside the source")
    check_destination(dst, overwrite=overwrite)  # last: its advice, --overwrite, must not lead to one of the above


def execute(
    dst: Path,
    *,
    source: TensorSource,
    target: Target,
    casts: Mapping[str, str],
    write_small_files: Callable[[Path], list[str]],
    carried: Collection[Path] = (),
    native_rows: RowNumbers | None = None,
    vouched: Vouched | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
    workers: int = DEFAULT_WORKERS,
    digests: bool = True,
    fingerprint: str | None = None,
    resume: bool = False,
    allow_nonfinite: bool = True,
    encoders: Mapping[str, Encoder] | None = None,
    scales_from: TensorSource | None = None,
    selected: str = "",
) -> Execution:
    """Fill `target` from `source` in a folder that becomes `dst` on success and is removed otherwise.

    `carried`: the files that `write_small_files` copies; their size counts for the free space needed.
    `vouched`: the digests that the values must have as they are read; another one is an error. Without `digests` the
    manifest has none, only the CRC32 of every file.
    `fingerprint` names the plan (journal.plan_fingerprint). With it and `resume`, work continues from what an
    earlier attempt with the same fingerprint has written, and is kept when an interrupt or a full disk ends it.
    `encoders` quantize tensors of `source` (copy_tensors) with scales that they read from `scales_from`.
    `allow_nonfinite`: whether values that are NaN or infinite are counted or refused.
    `selected`: the model of the source, where that holds several.
    """
    require_room(dst, target, carried)
    plan = None if fingerprint is None else f"{fingerprint[:12]}{reading_order(source, BLOCK_BYTES, UNIT_BYTES)[:12]}"
    try:
        with staged_output(dst, fingerprint=plan, resume=resume, overwrite=overwrite) as made:
            _keep_only(made.folder, target.file_bytes)
            data_bytes = sum(prod(info.shape) * itemsize(info.dtype) for info in target.tensors.values())
            with progress(data_bytes, "copying") as advance:
                copied = copy_tensors(
                    source,
                    target,
                    made.folder,
                    casts=casts,
                    encoders=encoders,
                    workers=workers,
                    digests=digests,
                    native_rows=native_rows,
                    check_source=vouched.check if vouched else None,
                    on_bytes=advance,
                    journal=made.journal if plan else None,
                )
            if copied.non_finite and not allow_nonfinite:
                raise _non_finite_error(copied.non_finite)
            files = target.finish(made.folder, copied.crc32)
            other_files = write_small_files(made.folder)
            tensors = {
                name: TensorSum(info.dtype, info.shape, copied.digests.get(name, ""))
                for name, info in target.tensors.items()
            }
            for name, encoder in (encoders or {}).items() if digests else ():
                shape = source.tensors[name].shape
                other = () if shape == tensors[name].shape else shape
                tensors[name] = replace(tensors[name], digest_dtype=encoder.digest_dtype, digest_shape=other)
            write_manifest(made.folder, tensors=tensors, files=files, selected=selected)
            for each in (source, scales_from):  # last: nothing is read after this
                _require_unchanged(each)
    except OSError as error:  # the disk filled up or went away
        raise CheckpointError(
            f"cannot write {dst}: {error.strerror or error}", hint=RESUME_HINT if resume else "nothing was left behind"
        ) from error
    return Execution(
        copied.non_finite, other_files, copied.relative_error, made.remarks, copied.resumed_bytes, copied.num_moved
    )


def _require_unchanged(source: TensorSource | None) -> None:
    """Raise CheckpointError where files that a source reads from have changed."""
    while source is not None:
        if check := getattr(source, "check_unchanged", None):
            check()
        source = getattr(source, "source", None)


def _keep_only(folder: Path, file_bytes: Mapping[str, int]) -> None:
    """Remove what an earlier attempt left, but for the files with tensor data."""
    for path in list(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in file_bytes:
            path.unlink()
        elif path.stat().st_size > file_bytes[path.name]:
            os.truncate(path, 0)


def _non_finite_error(counts: Mapping[str, int]) -> CheckpointError:
    found = [f"{fqn}: {count:,} value{'s' if count > 1 else ''}" for fqn, count in sorted(counts.items())]
    return CheckpointError(
        f"{len(found)} tensor{'s hold' if len(found) > 1 else ' holds'} values that are NaN or infinite:"
        + list_offenders(found),
        hint="nothing was written; a model with such weights computes only NaN",
        tries=["--allow-nonfinite"],
    )
