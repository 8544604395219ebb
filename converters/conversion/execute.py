"""Carry out a plan: copy into a temporary folder, add the small files, write the manifest last, move it into place."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.common.fold import fold_texts
from converters.containers.registry import replaceable
from converters.conversion.needs import estimate_needs, require_room
from converters.conversion.records import Execution, Plan, Run
from converters.engine.copy import CopyResult, Processing, copy_tensors
from converters.engine.journal import plan_fingerprint, reading_order
from converters.engine.units import BLOCK_BYTES, UNIT_BYTES
from converters.store.base import open_store
from converters.store.journal import Journal
from converters.store.location import Place, locate
from converters.store.manifest import TensorSum
from converters.store.output import RESUME_HINT, Output, can_resume, write_file, write_manifest
from converters.store.outputs import checked_claim, outputs_at


def check_places(src: Place, dst: Place, *, overwrite: bool) -> None:
    """Raise CheckpointError if `dst` may not be written: it exists, or replacing it would delete `src`."""
    source, destination = locate(src).resolved(), locate(dst).resolved()
    if source == destination:
        raise CheckpointError(f"{dst} is the source itself", hint="write to another folder")
    if source.is_inside(destination) or (destination.is_inside(source) and not open_store(source)[1]):
        raise CheckpointError(f"{src} and {dst}: one is inside the other", hint="write to a folder outside the source")
    location = locate(dst)  # last: the advice of this check, --overwrite, must not lead to one of the above
    outputs_at(location).check(location, overwrite=overwrite, marks=replaceable())


def execute(dst: Place, plan: Plan, run: Run, *, is_file: bool = False) -> Execution:
    """Fill the target of a plan in an output that becomes `dst` on success and is removed otherwise.

    With `run.resume` the output is kept if an interrupt or a full disk ends the work, and the next attempt at the same
    plan continues from it. `is_file`: `dst` is the only file of the target, not the folder of a checkpoint.
    """
    if run.dry_run:
        return Execution(needs=estimate_needs(dst, plan, workers=run.workers))
    require_room(dst, plan)
    location, target = locate(dst), plan.target
    outputs = outputs_at(location)
    if not is_file:
        outputs.check(location, overwrite=run.overwrite, marks=replaceable())
    fingerprint = _fingerprint(plan, run)
    claim = outputs.claim(
        location, files=target.file_bytes, is_file=is_file, fingerprint=fingerprint, resume=run.resume
    )
    try:
        with claim as claimed, _hinting(resume=run.resume):
            checked_claim(claimed, location)
            copied, other_files = _write(claimed.output, plan, run, claimed.journal if fingerprint else None)
            for reader in plan.readers:  # last: nothing is read after this
                reader.check_unchanged()
            claimed.output.commit(overwrite=run.overwrite, marks=replaceable())
    except OSError as error:  # the disk filled up or went away
        hint = RESUME_HINT if run.resume else "nothing was left behind"
        raise CheckpointError(f"cannot write {dst}: {error.strerror or error}", hint=hint) from error
    return Execution(
        copied.non_finite,
        other_files,
        copied.relative_error,
        (*claimed.remarks, *_describe_read_twice(copied.read_twice)),
        copied.resumed_bytes,
        copied.num_moved,
    )


def _write(output: Output, plan: Plan, run: Run, journal: Journal | None) -> tuple[CopyResult, list[str]]:
    """Write all files of an output, the manifest last; returns the names of the small ones, too."""
    source, target = plan.source, plan.target
    data_bytes = sum(prod(info.shape) * itemsize(info.dtype) for info in target.tensors.values())
    with run.progress(data_bytes, "copying") as advance:
        processing = Processing(
            plan.casts, plan.encoders, run.digests, plan.native_rows, plan.vouched.check if plan.vouched else None
        )
        copied = copy_tensors(
            source, target, output, processing, workers=run.workers, on_bytes=advance, journal=journal
        )
    if copied.non_finite and not plan.allow_nonfinite:
        raise _non_finite_error(copied.non_finite)
    files = copied.files | {name: write_file(output, name, data) for name, data in target.other_files.items()}
    other_files = plan.write_small_files(output.folder)
    tensors = {
        name: TensorSum(info.dtype, info.shape, copied.digests.get(name, "")) for name, info in target.tensors.items()
    }
    for name, encoder in plan.encoders.items() if run.digests else ():
        shape = source.tensors[name].shape
        other = () if shape == tensors[name].shape else shape
        tensors[name] = replace(tensors[name], digest_dtype=encoder.digest_dtype, digest_shape=other)
    selected = plan.catalog.place_of_selected if plan.catalog else ""
    write_manifest(output, tensors=tensors, files=files, selected=selected)
    return copied, other_files


@contextmanager
def _hinting(*, resume: bool) -> Iterator[None]:
    """Add how to continue to the error of an output that is kept."""
    try:
        yield
    except BaseException as error:
        if not (resume and can_resume(error)):
            raise
        if isinstance(error, CheckpointError):
            error.hint, error.tries = RESUME_HINT, ()
        else:
            error.add_note(RESUME_HINT)
        raise


def _describe_read_twice(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"read twice, because files there can only be appended to: {', '.join(fold_texts(names))}"]


def _fingerprint(plan: Plan, run: Run) -> str | None:
    """Text that identifies the work, to resume only the same; None for a source that is no checkpoint."""
    if plan.catalog is None:
        return None
    whole = plan_fingerprint(plan.catalog, plan.target, plan.casts, digests=run.digests, quantization=plan.quantization)
    return f"{whole[:12]}{reading_order(plan.source, BLOCK_BYTES, UNIT_BYTES)[:12]}"


def _non_finite_error(counts: Mapping[str, int]) -> CheckpointError:
    found = [f"{fqn}: {count:,} value{'s' if count > 1 else ''}" for fqn, count in sorted(counts.items())]
    return CheckpointError(
        f"{len(found)} tensor{'s hold' if len(found) > 1 else ' holds'} values that are NaN or infinite:"
        + list_offenders(found),
        hint="nothing was written; a model with such weights computes only NaN",
        tries=["--allow-nonfinite"],
    )
