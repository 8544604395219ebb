"""Carry out a plan: copy into a temporary folder, add the small files, write the manifest last, move it into place."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.conversion.needs import estimate_needs, require_room
from converters.conversion.records import Execution, Plan, Run
from converters.engine.copy import BLOCK_BYTES, UNIT_BYTES, copy_tensors
from converters.engine.journal import plan_fingerprint, reading_order
from converters.integrity.staging import RESUME_HINT, staged_output
from converters.store.commit import check_destination
from converters.store.commit import commit as commit_folder
from converters.store.manifest import TensorSum, write_manifest


def check_places(src: Path, dst: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError if `dst` may not be written: it exists, or replacing it would delete `src`."""
    source, destination = src.resolve(), dst.resolve()
    if source == destination:
        raise CheckpointError(f"{dst} is the source itself", hint="write to another folder")
    if source.is_relative_to(destination) or (destination.is_relative_to(source) and source.is_dir()):
        raise CheckpointError(f"{src} and {dst}: one is inside the other", hint="write to a folder outside the source")
    check_destination(dst, overwrite=overwrite)  # last: its advice, --overwrite, must not lead to one of the above


def execute(dst: Path, plan: Plan, run: Run, *, commit: Callable[[Path], None] | None = None) -> Execution:
    """Fill the target of a plan in a folder that becomes `dst` on success and is removed otherwise.

    With `run.resume` the folder is kept if an interrupt or a full disk ends the work, and the next attempt at the same
    plan continues from it. `commit` moves the folder, or what is in it, to `dst`; None: as the folder of a checkpoint.
    """
    if run.dry_run:
        return Execution(needs=estimate_needs(dst, plan, workers=run.workers))
    require_room(dst, plan)
    source, target = plan.source, plan.target
    if commit is None:
        check_destination(dst, overwrite=run.overwrite)
        commit = partial(commit_folder, dst=dst, overwrite=run.overwrite)
    fingerprint = _fingerprint(plan, run)
    try:
        with staged_output(dst, fingerprint=fingerprint, resume=run.resume, commit=commit) as made:
            _keep_only(made.folder, target.file_bytes)
            data_bytes = sum(prod(info.shape) * itemsize(info.dtype) for info in target.tensors.values())
            with run.progress(data_bytes, "copying") as advance:
                copied = copy_tensors(
                    source,
                    target,
                    made.folder,
                    casts=plan.casts,
                    encoders=plan.encoders,
                    workers=run.workers,
                    digests=run.digests,
                    native_rows=plan.native_rows,
                    check_source=plan.vouched.check if plan.vouched else None,
                    on_bytes=advance,
                    journal=made.journal if fingerprint else None,
                )
            if copied.non_finite and not plan.allow_nonfinite:
                raise _non_finite_error(copied.non_finite)
            files = target.finish(made.folder, copied.crc32)
            other_files = plan.write_small_files(made.folder)
            tensors = {
                name: TensorSum(info.dtype, info.shape, copied.digests.get(name, ""))
                for name, info in target.tensors.items()
            }
            for name, encoder in plan.encoders.items() if run.digests else ():
                shape = source.tensors[name].shape
                other = () if shape == tensors[name].shape else shape
                tensors[name] = replace(tensors[name], digest_dtype=encoder.digest_dtype, digest_shape=other)
            selected = plan.catalog.place_of_selected if plan.catalog else ""
            write_manifest(made.folder, tensors=tensors, files=files, selected=selected)
            for reader in plan.readers:  # last: nothing is read after this
                reader.check_unchanged()
    except OSError as error:  # the disk filled up or went away
        hint = RESUME_HINT if run.resume else "nothing was left behind"
        raise CheckpointError(f"cannot write {dst}: {error.strerror or error}", hint=hint) from error
    return Execution(
        copied.non_finite, other_files, copied.relative_error, made.remarks, copied.resumed_bytes, copied.num_moved
    )


def _fingerprint(plan: Plan, run: Run) -> str | None:
    """Text that identifies the work, to resume only the same; None for a source that is no checkpoint."""
    if plan.catalog is None:
        return None
    whole = plan_fingerprint(plan.catalog, plan.target, plan.casts, digests=run.digests, quantization=plan.quantization)
    return f"{whole[:12]}{reading_order(plan.source, BLOCK_BYTES, UNIT_BYTES)[:12]}"


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
