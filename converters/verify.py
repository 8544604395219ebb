"""Check a checkpoint as far as it can be checked: structure, cover, names and shapes, CRC32s, digests."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from converters.casts import count_non_finite
from converters.catalog import Catalog
from converters.copy import RowNumbers, row_blocks
from converters.digest import TensorDigest
from converters.dtypes import itemsize
from converters.errors import CheckpointError, UnsupportedError
from converters.execute import Progress, no_progress
from converters.families.registry import get_family
from converters.manifest import MANIFEST, Manifest, check_files, read_manifest
from converters.model_info import says_model
from converters.open import open_checkpoint
from converters.read import BLOCK_BYTES, CatalogReader
from converters.view import foreign_view
from converters.weights import native_weights


@dataclass(frozen=True, slots=True)
class Check:
    """One check and what came of it; `problems` list every offender."""

    name: str
    outcome: Literal["ok", "failed", "not possible"]
    detail: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks in the order they were made. `non_finite`: tensors that hold NaN or infinity, which is no damage."""

    path: str
    container: str
    checks: tuple[Check, ...]
    num_tensors: int
    num_bytes: int
    non_finite: dict[str, int]

    @property
    def ok(self) -> bool:
        return not any(check.outcome == "failed" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def verify(path: Path | str, *, quick: bool = False, progress: Progress = no_progress) -> VerifyReport:
    """Check everything that `path` offers to check. `quick` reads headers only.

    Raises CheckpointError where there is nothing at `path`; a checkpoint that does not open is a failed check.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    try:
        catalog = open_checkpoint(path)
    except CheckpointError as error:
        hints = tuple(line for line in (error.hint, *error.tries) if line)
        return VerifyReport(str(path), "", (Check("structure", "failed", error.message, hints),), 0, 0, {})
    num_chunks = sum(len(entry.chunks) for entry in catalog.tensors.values())
    checks = [Check("structure", "ok", f"{num_chunks:,} chunks cover {len(catalog.tensors):,} tensors exactly")]
    model_check, native_rows = _check_model(catalog)
    checks.append(model_check)
    non_finite: dict[str, int] = {}
    if not quick:
        manifest = read_manifest(catalog.root) if path.is_dir() else None
        checks.append(_check_files(catalog, manifest))
        if checks[-1].outcome == "ok":  # values of files that are known to be damaged say nothing more
            with progress(catalog.num_bytes, "reading") as advance:
                checks.append(_check_values(catalog, manifest, native_rows, non_finite, advance))
    return VerifyReport(
        str(path), catalog.container, tuple(checks), len(catalog.tensors), catalog.num_bytes, non_finite
    )


def _check_model(catalog: Catalog) -> tuple[Check, RowNumbers | None]:
    """Whether the tensors are those of the model; and how stored rows are numbered natively, for the digests."""
    name = "names and shapes"
    try:
        with native_weights(catalog) as weights:
            info, family = weights.info, get_family(weights.info.family)
            what = f"{info.family}, {info.args.num_layers} layers, dim {info.args.dim}, {weights.naming} names"
            if not weights.source.row_orders:
                return Check(name, "ok", what), None
            stored = foreign_view(weights.source, info, family.namings[weights.naming])
            return Check(name, "ok", what), stored.native_rows
    except UnsupportedError as error:
        return Check(name, "not possible", error.message), None
    except CheckpointError as error:
        return Check(name, "failed" if says_model(catalog.root) else "not possible", error.message), None


def _check_files(catalog: Catalog, manifest: Manifest | None) -> Check:
    """Every byte against the manifest; without one, against the CRC32s that the container itself carries."""
    if manifest is not None:
        problems = check_files(catalog.root)
        return _judge("files", f"{len(manifest.files)} files against size and CRC32 in {MANIFEST}", problems)
    if catalog.container == "safetensors":
        return Check("files", "ok", f"structure only: safetensors carries no checksums, and there is no {MANIFEST}")
    problems = []
    with CatalogReader(catalog) as reader:
        num_unsummed = 0
        for fqn, entry in catalog.tensors.items():
            try:
                problems += reader.record_problems(fqn)
                num_unsummed += sum(reader.located(fqn, chunk).crc32 is None for chunk in entry.chunks)
            except CheckpointError as error:
                problems.append(error.message)
        for fqn in catalog.blobs:
            problems += reader.blob_problems(fqn)
    detail = f"every item against the CRC32 that it carries (there is no {MANIFEST})"
    return _judge("files", detail + (f"; {num_unsummed} items carry none" if num_unsummed else ""), problems)


def _check_values(
    catalog: Catalog,
    manifest: Manifest | None,
    native_rows: RowNumbers | None,
    non_finite: dict[str, int],
    advance: Callable[[int], None],
) -> Check:
    """Every tensor read as a reader would, against dtype, shape and digest of the manifest."""
    problems, num_digests = [], 0
    with CatalogReader(catalog) as reader:
        for fqn, info in reader.tensors.items():
            try:
                digest, count = _read_through(reader, fqn, native_rows, advance)
            except CheckpointError as error:
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
            elif listed.digest:
                num_digests += 1
                if listed.digest != digest:
                    problems.append(f"{fqn}: its values have changed (digest)")
    if manifest is None and not problems:
        return Check("values", "ok", f"all tensors can be read; there is no {MANIFEST} to compare them with")
    return _judge("values", f"{num_digests} tensors against their digests", problems)


def _read_through(
    reader: CatalogReader, fqn: str, native_rows: RowNumbers | None, advance: Callable[[int], None]
) -> tuple[str, int]:
    """(digest, number of values that are not finite) of a tensor, read block by block."""
    info, num_non_finite = reader.tensors[fqn], 0
    digest = TensorDigest(info.dtype, info.shape)
    for boxes in row_blocks(info.shape, itemsize(info.dtype), BLOCK_BYTES):
        for box in boxes:
            array = reader.read(fqn, box)
            num_non_finite += count_non_finite(array, info.dtype)
            rows = digest.row_numbers(box)
            digest.update(box, array, rows=native_rows(fqn, rows) if native_rows else rows)
            advance(array.nbytes)
    return digest.hexdigest(), num_non_finite


def _judge(name: str, detail: str, problems: list[str]) -> Check:
    return Check(name, "failed" if problems else "ok", detail, tuple(problems))
