"""Fill a target from a source: whole-row blocks of about 1 MiB, each read, cast, hashed and written once."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from converters.common.box import Box, TensorSource
from converters.common.crc import join_crc32
from converters.common.errors import CheckpointError, list_offenders
from converters.common.threads import deferred_signals, in_parallel
from converters.containers.target import Target
from converters.engine.units import Unit, find_read_twice, read_blocks, units_in_order, units_of
from converters.engine.writers import OffsetWriter, OrderWriter, Writer, Writing
from converters.store.digest import TensorDigest
from converters.store.journal import Journal
from converters.store.manifest import FileSum
from converters.store.output import Output
from converters.views.casts import cast, check_castable, count_non_finite
from converters.views.encoder import Encoder
from converters.views.expressions import RowNumbers

DEFAULT_WORKERS = 2


@dataclass(slots=True)
class CopyResult:
    """What was written: CRC32 per slot (in the order of `Target.slots`), digest and non-finite values per tensor."""

    crc32: list[int]
    digests: dict[str, str] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)  # only of tensors that have any
    relative_error: dict[str, float] = field(default_factory=dict)  # largest error of a cast, where it is not exact
    resumed_bytes: int = 0  # written by an earlier attempt, and read back
    num_moved: int = 0  # scales that differ from the known ones (see Encoder)
    files: dict[str, FileSum] = field(default_factory=dict)  # size and CRC32 of every file with tensors
    read_twice: Sequence[str] = ()  # tensors, because the output can only be appended to


@dataclass(frozen=True, slots=True)
class Processing:
    """What is done to values on their way.

    `casts` (FQN → dtype) are the only casts; a finite value that becomes infinite is an error that lists all tensors
    with such values. `encoders` (FQN → encoder) make two tensors of the target, codes and scales, of one of the source;
    the digest of the codes is that of the values that they stand for. `native_rows`: the rows that the digests number;
    None: those of the source. `check_source` gets the digests of what was read, before any cast, and raises if they are
    wrong.
    """

    casts: Mapping[str, str] = field(default_factory=dict)
    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    digests: bool = True
    native_rows: RowNumbers | None = None
    check_source: Callable[[Mapping[str, TensorDigest]], None] | None = None


UNCHANGED = Processing()


def copy_tensors(
    source: TensorSource,
    target: Target,
    output: Output,
    processing: Processing = UNCHANGED,
    *,
    workers: int = DEFAULT_WORKERS,
    on_bytes: Callable[[int], None] | None = None,
    journal: Journal | None = None,
) -> CopyResult:
    """Write the files of `target` that have tensors: copy every slot from `source`, and write what is around them.

    Memory: a few blocks per worker. `on_bytes` is called for each unit. `journal` records every unit that is written;
    units that it has recorded before are skipped if the output still has what they wrote.
    """
    _check_match(source, target, processing.casts, processing.encoders)
    casts = {fqn: dtype for fqn, dtype in processing.casts.items() if dtype != source.tensors[fqn].dtype}
    processing = replace(processing, casts=casts)
    totals = _Totals(source, target, processing)
    writer: Writer
    if output.offset_files is not None:
        units = units_of(source, target, processing.encoders)
        writer = OffsetWriter(target, output.offset_files, resuming=journal is not None)
    else:
        is_digested = processing.digests or processing.check_source is not None
        twice = find_read_twice(target, processing.encoders, digested=is_digested)
        units, totals.result.read_twice = units_in_order(source, target, processing.encoders, twice), twice
        writer = OrderWriter(target, output, totals.result.crc32, journal=journal)
    copier = _Copier(source, target, processing, writer, journal)
    # Closed in this order in any case: first the threads stop writing, then the files are closed.
    results = in_parallel(copier.run, units, workers)
    with deferred_signals() as deliver_signals, writer, closing(results):
        for unit in results:
            deliver_signals()
            totals.add(unit)
            writer.take(unit.writing)
            if journal and not unit.resumed:
                journal.append(unit.number, unit.record())
            if on_bytes:
                on_bytes(unit.num_bytes)
        totals.check()
        totals.result.files = writer.finish(totals.result.crc32)
    return totals.result


@dataclass(frozen=True, slots=True)
class _Copier:
    """Copies units; several threads do so at the same time."""

    source: TensorSource
    target: Target
    processing: Processing
    writer: Writer
    journal: Journal | None

    def run(self, unit: Unit) -> Unit:
        """Copy a unit, unless the journal and the output have it."""
        if self.journal and (record := self.journal.recorded(unit.number)):
            recorded = replace(unit, writing=Writing(unit.writing.only_slot))
            recorded.recall(record)
            if self.writer.still_has(recorded.writing):
                return recorded
        self._copy(unit)
        if not unit.is_counted:
            unit.moved = unit.non_finite = unit.overflows = 0
        return unit

    def _copy(self, unit: Unit) -> None:
        fqn, how = unit.fqn, self.processing
        encoder, dtype = how.encoders.get(fqn), how.casts.get(fqn)
        digest, source_digest, scales_digest = self._digests(unit)
        for box, array in read_blocks(self.source, fqn, unit.boxes, whole=encoder is not None):
            if source_digest is not None:
                self._add(source_digest, fqn, box, array)
            if dtype is not None:
                done = cast(array, dtype)
                array = done.values
                unit.overflows += done.overflows
                unit.relative_error = max(unit.relative_error, done.relative_error)
            array = np.ascontiguousarray(array)
            unit.non_finite += count_non_finite(array, array.dtype.name)
            if encoder:
                encoded = encoder.encode(box, array)
                unit.moved += encoded.num_moved
                self._write(unit, encoder.scales, encoded.place, encoded.scales)
                if scales_digest is not None:
                    scales_digest.update(encoded.place, encoded.scales)
                self._write(unit, fqn, encoded.codes_place, encoded.codes)
                array = encoder.values_of(encoded, box) if digest is not None else array
            else:
                self._write(unit, fqn, box, array)
            if digest is not None:
                self._add(digest, fqn, box, array)
        self.writer.end(unit.writing)
        unit.digest = digest.partial if digest else None
        unit.source_digest = source_digest.partial if source_digest else None
        unit.scales_digest = scales_digest.partial if scales_digest else None

    def _digests(self, unit: Unit) -> tuple[TensorDigest | None, TensorDigest | None, TensorDigest | None]:
        """The digests that a unit adds to: of what is written, of what is read if that differs, and of the scales."""
        fqn, how = unit.fqn, self.processing
        if not unit.is_digested:
            return None, None, None
        encoder, is_checked = how.encoders.get(fqn), how.check_source is not None
        digest = of_source = of_scales = None
        if how.digests or (is_checked and not encoder):
            digest = _new_digest(fqn, self.source, self.target, how)
        if is_checked and (encoder or fqn in how.casts):
            of_source = _source_digest(fqn, self.source)
        if encoder and how.digests:
            of_scales = _new_digest(encoder.scales, self.source, self.target, how)
        return digest, of_source, of_scales

    def _add(self, digest: TensorDigest, fqn: str, box: Box, array: np.ndarray) -> None:
        rows, native_rows = digest.row_numbers(box), self.processing.native_rows
        digest.update(box, array, rows=native_rows(fqn, rows) if native_rows else rows)

    def _write(self, unit: Unit, fqn: str, box: Box, array: np.ndarray) -> None:
        if self.writer.write(unit.writing, fqn, box, array):
            unit.num_bytes += array.nbytes


class _Totals:
    """The sum of what units have done, which come in order."""

    def __init__(self, source: TensorSource, target: Target, processing: Processing):
        self.result = CopyResult([0] * len(target.slots))
        self._target, self._processing = target, processing
        self._sums = {fqn: _new_digest(fqn, source, target, processing) for fqn in target.tensors}
        changed = (*processing.casts, *processing.encoders)
        self._source_sums = {fqn: _source_digest(fqn, source) for fqn in changed}
        self._filled = [0] * len(target.slots)
        self._overflows: dict[str, int] = {}

    def add(self, unit: Unit) -> None:
        """Add a unit."""
        result = self.result
        for run in unit.writing.runs.values():  # units are in order, and so are the runs of each slot
            assert run.offset == self._filled[run.slot], f"{unit.fqn}: a gap in a slot"
            result.crc32[run.slot] = join_crc32(result.crc32[run.slot], run.crc32, run.length)
            self._filled[run.slot] += run.length
        if unit.digest is not None:
            self._sums[unit.fqn].add_partial(unit.digest)
        if unit.source_digest is not None:
            self._source_sums[unit.fqn].add_partial(unit.source_digest)
        if unit.scales_digest is not None:
            self._sums[self._processing.encoders[unit.fqn].scales].add_partial(unit.scales_digest)
        result.num_moved += unit.moved
        for counts, number in ((result.non_finite, unit.non_finite), (self._overflows, unit.overflows)):
            if number:
                counts[unit.fqn] = counts.get(unit.fqn, 0) + number
        if unit.relative_error:
            known = result.relative_error.get(unit.fqn, 0.0)
            result.relative_error[unit.fqn] = max(known, unit.relative_error)
        if unit.resumed:
            result.resumed_bytes += unit.num_bytes

    def check(self) -> None:
        """Fill in the digests. Raises CheckpointError if the source has other digests, or if a cast overflows."""
        if self._processing.check_source:  # first: damaged values may overflow, too
            self._processing.check_source(self._sums | self._source_sums)
        if self._overflows:
            raise _overflow_error(self._overflows, self._processing.casts)
        for slot, num_bytes in zip(self._target.slots, self._filled, strict=True):
            assert num_bytes == slot.num_bytes, f"{slot.fqn}: a slot was not filled"
        if self._processing.digests:
            self.result.digests = {fqn: digest.hexdigest() for fqn, digest in self._sums.items()}


def _new_digest(fqn: str, source: TensorSource, target: Target, processing: Processing) -> TensorDigest:
    """An empty digest of a tensor of the target; of codes that of their values, which may have another shape."""
    if encoder := processing.encoders.get(fqn):
        return TensorDigest(encoder.digest_dtype, source.tensors[fqn].shape)
    return TensorDigest(target.tensors[fqn].dtype, target.tensors[fqn].shape)


def _source_digest(fqn: str, source: TensorSource) -> TensorDigest:
    """An empty digest of a tensor as it is read."""
    return TensorDigest(source.tensors[fqn].dtype, source.tensors[fqn].shape)


def _overflow_error(overflows: Mapping[str, int], casts: Mapping[str, str]) -> CheckpointError:
    lost = [
        f"{fqn}: {count:,} {'value does' if count == 1 else 'values do'} not fit {casts[fqn]}"
        for fqn, count in overflows.items()
    ]
    return CheckpointError(f"the cast overflows:{list_offenders(lost)}", hint="choose a wider --dtype")


def _check_match(
    source: TensorSource, target: Target, casts: Mapping[str, str], encoders: Mapping[str, Encoder]
) -> None:
    made = {encoder.scales for encoder in encoders.values()}
    lacking = [fqn for fqn in target.tensors if fqn not in source.tensors and fqn not in made]
    problems = [f"{fqn}: the source does not have it" for fqn in lacking]
    changes = {}
    for fqn, info in target.tensors.items():
        if fqn not in source.tensors:
            continue
        held = source.tensors[fqn]
        if fqn in encoders:
            continue
        if held.shape != info.shape:
            problems.append(f"{fqn}: {list(held.shape)} in the source, {list(info.shape)} expected")
        if casts.get(fqn, held.dtype) != info.dtype:
            problems.append(f"{fqn}: {held.dtype} in the source, {info.dtype} expected")
        changes[fqn] = (held.dtype, info.dtype)
    if problems:
        raise CheckpointError(f"source and target do not match:{list_offenders(problems)}")
    check_castable(changes)
