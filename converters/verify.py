"""Check a checkpoint as far as it can be checked: structure, cover, names and shapes, CRC32s, digests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.catalog import Catalog
from converters.dtypes import itemsize
from converters.engine.casts import count_non_finite
from converters.engine.copy import RowNumbers, whole_row_units
from converters.engine.digest import TensorDigest
from converters.engine.read import BLOCK_BYTES, CatalogReader
from converters.errors import CheckpointError, UnsupportedError
from converters.execute import Progress, no_progress
from converters.families.registry import get_family
from converters.formats.paths import refuse_links_out
from converters.formats.safetensors import index_remarks
from converters.manifest import MANIFEST, Manifest, check_files, read_manifest
from converters.model_info import says_model
from converters.open import open_checkpoint, require_there
from converters.verify_report import Check, VerifyReport
from converters.view import foreign_view
from converters.weights import NativeWeights, native_weights


def verify(
    path: Path | str,
    *,
    quick: bool = False,
    model_from: Path | str | None = None,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Check everything that `path` offers to check. `quick` reads headers and small files, and no tensor.

    `model_from`: a folder that says what the model is, where the checkpoint does not.

    Raises CheckpointError where there is nothing at `path`; a checkpoint that does not open is a failed check.
    """
    path = Path(path)
    require_there(path)
    try:
        catalog = open_checkpoint(path)
    except CheckpointError as error:
        hints = tuple(line for line in (error.hint, *error.tries) if line)
        checks = [Check("structure", "failed", error.message, hints), *_check_unopened(path, quick=quick)]
        return VerifyReport(str(path), "", tuple(checks), 0, 0, {})
    except UnsupportedError as error:
        checks = [check for check in _check_unopened(path, quick=quick) if check.outcome == "failed"]
        if not checks:  # whole, as far as anybody can tell, and of a kind that is not covered
            raise
        return VerifyReport(str(path), "", (Check("structure", "failed", error.message), *checks), 0, 0, {})
    checks = [_tell_structure(catalog)]
    if catalog.container == "safetensors" and path.is_dir():
        checks += _check_index(catalog)
    if catalog.container == "dcp":
        checks += _check_gaps(catalog)
    if catalog.notes:
        checks.append(Check("reading", "warning", "how the weights were found", tuple(catalog.notes)))
    model_check, native_rows = _check_model(catalog, model_from)
    checks.append(model_check)
    manifest = _manifest_of(catalog, path)
    non_finite: dict[str, int] = {}
    checks.append(_check_files(catalog, manifest, path, quick=quick))
    if quick:
        checks.append(Check("values", "not done", "no tensor was read (--quick)"))
    elif checks[-1].outcome == "failed":
        checks.append(_check_damaged(catalog, manifest, checks[-1], native_rows))
    else:
        with progress(catalog.num_bytes, "reading") as advance:
            checks.append(_check_values(catalog, manifest, native_rows, non_finite, advance))
    return VerifyReport(
        str(path), catalog.container, tuple(checks), len(catalog.tensors), catalog.num_bytes, non_finite
    )


def _check_unopened(path: Path, *, quick: bool) -> list[Check]:
    """All files of a folder that does not open against its manifest, so that every one that changed is named.

    Where links lead out of the folder nothing is read; they may be why it did not open, or lie beside that reason.
    """
    if quick or not path.is_dir():
        return []
    try:
        refuse_links_out(path, [path / MANIFEST])
        manifest = read_manifest(path)
        if manifest is None:
            return []
        refuse_links_out(path, [path / name for name in manifest.files])
        return [_judge("files", f"against size and CRC32 in {MANIFEST}", check_files(path))]
    except (CheckpointError, OSError):  # the manifest itself or a link, which opening has told already
        return []


def _check_damaged(catalog: Catalog, manifest: Manifest | None, files: Check, native_rows: RowNumbers | None) -> Check:
    """Which tensors were hit: those in files that have changed, against their digests. The others are not read."""
    damaged = {problem.split(": ")[0] for problem in files.problems}
    inside = {n: t for n, t in catalog.tensors.items() if any(chunk.file in damaged for chunk in t.chunks)}
    if manifest is None or not inside:
        return Check("values", "not done", "files are damaged; values that were not hit say nothing more")
    check = _check_values(replace(catalog, tensors=inside), manifest, native_rows, {}, lambda num_bytes: None)
    if check.outcome == "failed":
        return check
    return replace(
        check, outcome="not done", detail=f"of {len(inside):,} tensors in damaged files none was seen to change"
    )


def _tell_structure(catalog: Catalog) -> Check:
    """What opening has checked: it raises where anything of it is wrong."""
    files = {chunk.file for entry in catalog.tensors.values() for chunk in entry.chunks}
    num_chunks = sum(len(entry.chunks) for entry in catalog.tensors.values())
    parts = [
        f"{num_chunks:,} chunks cover {len(catalog.tensors):,} tensors exactly",
        f"{len(files):,} files as long as they must be" if len(files) > 1 else "1 file as long as it must be",
    ]
    if catalog.container == "safetensors":
        parts.append("no hole, overlap or trailing byte")
    if catalog.blobs:
        parts.append(f"{len(catalog.blobs):,} other entries")
    return Check("structure", "ok", "; ".join(parts))


def _check_index(catalog: Catalog) -> list[Check]:
    """What is odd about the index, beyond what opening compares, which is each tensor's place. []: nothing."""
    remarks = index_remarks(catalog.root, sum(entry.num_bytes for entry in catalog.tensors.values()))
    return [Check("index", "warning", "every tensor is where it should be, but", tuple(remarks))] if remarks else []


def _check_gaps(catalog: Catalog) -> list[Check]:
    """Bytes of DCP files that no item takes, or that two take; []: none. Nobody reads the former."""
    extents: dict[str, set[tuple[int, int]]] = {}
    for entry in catalog.tensors.values():
        for chunk in entry.chunks:
            extents.setdefault(chunk.file, set()).add(chunk.item)
    for blob in catalog.blobs.values():
        extents.setdefault(blob.file, set()).add((blob.byte_offset, blob.length))
    remarks = []
    for file, items in extents.items():
        size, taken = (catalog.root / file).stat().st_size, sum(length for _, length in items)
        if size != taken:
            remarks.append(f"{file}: {size:,} bytes, of which its items take {taken:,}")
    return (
        [Check("items", "warning", "files hold other bytes than those of their items", tuple(remarks))]
        if remarks
        else []
    )


def _check_model(catalog: Catalog, model_from: Path | str | None) -> tuple[Check, RowNumbers | None]:
    """Whether the tensors are those of the model; and how stored rows are numbered natively, for the digests."""
    name = "names and shapes"
    try:
        with native_weights(catalog, model_from=model_from) as weights:
            args = weights.info.args
            what = f"{weights.info.family}, {args.num_layers} layers, dim {args.dim}, {weights.naming} names"
            return Check(name, "ok", what), _native_rows(weights)
    except UnsupportedError as error:
        return Check(name, "not possible", error.message), None
    except CheckpointError as error:
        outcome = "failed" if model_from or says_model(catalog.root) else "not possible"
        return Check(name, outcome, error.message), _rows_of_a_part(catalog, model_from)


def _native_rows(weights: NativeWeights) -> RowNumbers | None:
    if not weights.source.row_orders:
        return None
    naming = get_family(weights.info.family).namings[weights.naming]
    return foreign_view(weights.source, weights.info, naming).native_rows


def _rows_of_a_part(catalog: Catalog, model_from: Path | str | None) -> RowNumbers | None:
    """Of a model that is not whole (`convert --allow-missing`): what there is of it has its digests all the same."""
    try:
        with native_weights(catalog, model_from=model_from, allow_missing=True, allow_extra=True) as weights:
            return _native_rows(weights)
    except CheckpointError:
        return None


def _manifest_of(catalog: Catalog, path: Path) -> Manifest | None:
    """The manifest of a folder; of a single file the one beside it, where that lists the file and its tensors."""
    manifest = read_manifest(catalog.root)
    if manifest is None or path.is_dir():
        return manifest
    return manifest if path.name in manifest.files and catalog.tensors.keys() <= manifest.tensors.keys() else None


def _check_files(catalog: Catalog, manifest: Manifest | None, path: Path, *, quick: bool) -> Check:
    """Every byte against the manifest; without one, against the CRC32s that the container itself carries."""
    if manifest is not None:
        if quick:
            holding = {chunk.file for entry in catalog.tensors.values() for chunk in entry.chunks}
            small = sorted(manifest.files.keys() - holding)
            detail = (
                f"sizes of {len(manifest.files)} files against {MANIFEST}, CRC32 of the {len(small)} without tensors"
            )
            return _judge("files", detail, check_files(catalog.root, small))
        if path.is_file():
            problems = check_files(catalog.root, [path.name])
            return _judge("files", f"{path.name} against size and CRC32 in {MANIFEST}", problems)
        problems = check_files(catalog.root)
        return _judge("files", f"{len(manifest.files)} files against size and CRC32 in {MANIFEST}", problems)
    if catalog.container == "safetensors":
        return Check("files", "not possible", f"safetensors carries no checksums, and there is no {MANIFEST}")
    if quick:
        return Check("files", "not done", "no item was compared with its CRC32 (--quick)")
    return _check_items(catalog)


def _check_items(catalog: Catalog) -> Check:
    """Each record of torch's against the CRC32 that torch writes and never looks at."""
    problems, num_summed, num_unsummed = [], 0, 0
    with CatalogReader(catalog) as reader:
        for fqn, entry in catalog.tensors.items():
            chunks = (*entry.chunks, *catalog.copies.get(fqn, ()))
            try:
                problems += reader.record_problems(fqn)
                absent = sum(_carries_none(reader, fqn, chunk) for chunk in chunks)
            except (CheckpointError, UnsupportedError) as error:
                problems.append(error.message)
                continue
            num_unsummed += absent
            num_summed += len(chunks) - absent
        for fqn in catalog.blobs:
            problems += reader.blob_problems(fqn)
    num_summed += len(catalog.blobs)
    detail = f"{num_summed:,} items against the CRC32 that each carries (there is no {MANIFEST})"
    if num_unsummed and not problems:
        told = f"{num_unsummed:,} items carry no CRC32 and could not be checked"
        return Check("files", "warning" if num_summed else "not possible", detail if num_summed else told, (told,))
    return _judge("files", detail, problems)


def _carries_none(reader: CatalogReader, fqn: str, chunk: Any) -> bool:
    chunk = reader.located(fqn, chunk)
    return chunk.crc32 is None and chunk.record is not None and chunk.record[1] > 0


def _check_values(
    catalog: Catalog,
    manifest: Manifest | None,
    native_rows: RowNumbers | None,
    non_finite: dict[str, int],
    advance: Callable[[int], None],
) -> Check:
    """Every tensor read as a reader would, against dtype, shape and digest of the manifest."""
    problems, without = [], []
    with CatalogReader(catalog) as reader:
        for fqn, info in reader.tensors.items():
            try:
                digest, count = _read_through(reader, fqn, native_rows, advance)
            except (CheckpointError, UnsupportedError) as error:
                problems.append(error.message)
                continue
            if count:
                non_finite[fqn] = count
            if manifest is None:
                continue
            listed = manifest.tensors[fqn]
            if (listed.dtype, listed.shape) != (info.dtype, info.shape):
                problems.append(
                    f"{fqn}: {info.dtype} {list(info.shape)}, listed as {listed.dtype} {list(listed.shape)}"
                )
            elif not listed.digest:
                without.append(fqn)
            elif listed.digest != digest:
                problems.append(f"{fqn}: its values have changed (digest)")
    if problems:
        return Check("values", "failed", "tensors as a reader gets them", tuple(problems))
    total = len(catalog.tensors)
    if manifest is None:
        detail = f"all {total:,} tensors can be read, but there is no {MANIFEST} to compare them with"
        return Check("values", "not possible", detail)
    if without:  # the CRC32 of their files is all there is
        told = f"{len(without):,} of {total:,} tensors have no digest: written with --no-digest"
        return Check("values", "not possible" if len(without) == total else "warning", told)
    return Check("values", "ok", f"{total:,} tensors against their digests")


def _read_through(
    reader: CatalogReader, fqn: str, native_rows: RowNumbers | None, advance: Callable[[int], None]
) -> tuple[str, int]:
    """(digest, number of values that are not finite) of a tensor, read block by block."""
    info, num_non_finite = reader.tensors[fqn], 0
    digest = TensorDigest(info.dtype, info.shape)
    for boxes in whole_row_units(info.shape, itemsize(info.dtype), BLOCK_BYTES):
        for box in boxes:
            array = reader.read(fqn, box)
            num_non_finite += count_non_finite(array, info.dtype)
            rows = digest.row_numbers(box)
            digest.update(box, array, rows=native_rows(fqn, rows) if native_rows else rows)
            advance(array.nbytes)
    return digest.hexdigest(), num_non_finite


def _judge(name: str, detail: str, problems: list[str]) -> Check:
    return Check(name, "failed" if problems else "ok", detail, tuple(problems))
