"""Verify a checkpoint: structure, cover, names and shapes, CRC32s, digests."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.names import MANIFEST
from converters.containers.registry import CONTAINERS
from converters.conversion.records import Progress, no_progress
from converters.integrity.accept import ChangedFolder, accept_changes, changed_folder, check_json
from converters.integrity.checks import (
    DigestRules,
    changed_tensors,
    check_container,
    check_downloaded,
    check_items,
    check_model,
    check_reading,
    check_structure,
    judge,
    read_tensors,
)
from converters.integrity.verify_report import Changes, Check, VerifyReport
from converters.source.models_inside import ROOT
from converters.source.open import open_checkpoint, require_exists
from converters.store.base import open_store
from converters.store.location import Location, Place, locate
from converters.store.manifest import Manifest, check_files, file_problems, read_manifest, with_names
from converters.store.paths import refuse_links_out
from converters.views.catalog import Catalog


def verify(
    place: Place,
    *,
    quick: bool = False,
    accept: bool = False,
    select: str | None = None,
    model_from: Place | None = None,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Make every check that is possible for a checkpoint. `quick` reads headers and small files, and no tensor.

    `accept`: the folder was changed on purpose: list what differs from its manifest, and replace the manifest if no
    check fails. `model_from`: a folder that describes the model, if the checkpoint does not. `select`: the model
    whose names and shapes are checked, if the checkpoint holds several.

    Raises CheckpointError if there is nothing at `place`, or nothing to accept; a checkpoint that does not open is a
    failed check.
    """
    path = locate(place)
    require_exists(path)
    changed = changed_folder(path) if accept else None
    if changed and changed.manifest.selected:
        select = select or ROOT
    try:
        catalog = open_checkpoint(path, select=select, against_manifest=changed is None)
    except CheckpointError as error:
        hints = tuple(line for line in (error.hint, *error.tries) if line and line != f"titan verify {path}")
        checks = [Check("structure", "failed", error.message, hints)]
        checks += [] if changed else _check_unopened(path, quick=quick)
        return VerifyReport(str(path), "", tuple(checks), 0, 0, {})
    except UnsupportedError as error:
        checks = [] if changed else _check_unopened(path, quick=quick)
        checks = [check for check in checks if check.outcome == "failed"]
        if not checks:  # not damaged as far as known, and not supported
            raise
        return VerifyReport(str(path), "", (Check("structure", "failed", error.message), *checks), 0, 0, {})
    checks = [check_structure(catalog)]
    checks += check_container(catalog, is_folder=not catalog.is_lone_file)
    checks += check_reading(catalog)
    model_check, rules = check_model(catalog, model_from)
    checks.append(model_check)
    if changed:
        more, non_finite, changes = _accept(catalog, changed, checks, rules, progress)
    else:
        (more, non_finite), changes = _compare(catalog, rules, progress, quick=quick), None
    num_tensors, num_bytes = len(catalog.tensors), catalog.num_bytes
    return VerifyReport(str(path), catalog.container, (*checks, *more), num_tensors, num_bytes, non_finite, changes)


def _accept(
    catalog: Catalog, changed: ChangedFolder, before: Sequence[Check], rules: DigestRules, progress: Progress
) -> tuple[list[Check], dict[str, int], Changes | None]:
    """Replace the manifest of a folder that was changed, unless a check fails: checks, NaN or infinite values, changes.

    `before`: the checks that were made already.
    """
    checks = [check_json(changed)]
    if CONTAINERS[catalog.container].has_checksums:
        checks.append(check_items(catalog, remark=f"{MANIFEST} is being replaced"))
    if any(check.outcome == "failed" for check in (*before, *checks)):  # reading damaged files would add nothing
        return checks, {}, None
    with progress(catalog.num_bytes, "reading") as advance:
        tensors = read_tensors(catalog, rules, {}, advance)
    if problems := tensors.damaged + tensors.unsupported:
        return [*checks, judge("values", "tensors as a reader gets them", problems)], tensors.non_finite, None
    compared, changes = accept_changes(changed, catalog, tensors.entries)
    return [*checks, *compared], tensors.non_finite, changes


def _compare(
    catalog: Catalog, rules: DigestRules, progress: Progress, *, quick: bool
) -> tuple[list[Check], dict[str, int]]:
    """Compare files and values with the manifest: checks, and the number of NaN or infinite values by tensor."""
    manifest = _manifest_for(catalog)
    files, changed_files = _check_files(catalog, manifest, quick=quick)
    if quick:
        return [files, Check("values", "not done", "no tensor was read (--quick)")], {}
    if files.outcome == "failed":
        return [files, _check_damaged(catalog, manifest, changed_files, rules)], {}
    with progress(catalog.num_bytes, "reading") as advance:
        values, non_finite = _check_values(catalog, manifest, rules, advance)
    return [files, values], non_finite


def _check_unopened(path: Location, *, quick: bool) -> list[Check]:
    """Compare all files of a folder that does not open with its manifest or the hub's checksums, to name every one.

    Nothing is read if links lead out of the folder.
    """
    store, file = open_store(path)
    if quick or file:
        return []
    try:
        root = store.local(name for name in store.names() if name == MANIFEST)
        refuse_links_out(root, [root / MANIFEST])
        manifest = read_manifest(root)
        if manifest is None:
            return check_downloaded(root)
        refuse_links_out(root, [root / name for name in manifest.files])
        return [judge("files", f"against size and CRC32 in {MANIFEST}", check_files(store, manifest=manifest))]
    except (CheckpointError, OSError):  # the manifest or a link, which opening has reported already
        return []


def _check_damaged(catalog: Catalog, manifest: Manifest | None, damaged: Collection[str], rules: DigestRules) -> Check:
    """Find the damaged tensors in files that have changed, by their digests. Other files are not read."""
    inside = {n: t for n, t in catalog.tensors.items() if any(chunk.file in damaged for chunk in t.chunks)}
    if rules.quantized:  # a weight is read with its scales, which may be in another file, and the other way round
        weights = {*inside, *(weight for name, weight in rules.quantized.scales.items() if name in inside)}
        weights |= {name for name, weight in rules.quantized.scales.items() if weight in weights}
        inside = {n: t for n, t in catalog.tensors.items() if n in weights}
    if manifest is None or not inside:
        return Check("values", "not done", "files are damaged; other values were not read")
    check, _ = _check_values(replace(catalog, tensors=inside), manifest, rules, lambda num_bytes: None)
    if check.outcome == "failed":
        return check
    return replace(
        check, outcome="not done", detail=f"of {len(inside):,} tensors in damaged files none is known to have changed"
    )


def _manifest_for(catalog: Catalog) -> Manifest | None:
    """The manifest of a folder; for a single file that of its folder, if it lists the file and its tensors."""
    manifest = catalog.manifest
    if manifest is None or not catalog.is_lone_file:
        return manifest
    return manifest if catalog.file in manifest.files and catalog.tensors.keys() <= manifest.tensors.keys() else None


def _check_files(catalog: Catalog, manifest: Manifest | None, *, quick: bool) -> tuple[Check, Collection[str]]:
    """Compare every byte with the manifest; also returns the names of the files that differ from it.

    Without a manifest, compare with the hub's checksums, or the container's CRC32s.
    """
    if manifest is None:
        return _check_without_manifest(catalog, quick=quick), ()
    names: list[str] | None = None
    if quick:
        names = sorted(manifest.files.keys() - catalog.tensor_files)
        detail = f"sizes of {len(manifest.files)} files against {MANIFEST}, CRC32 of the {len(names)} without tensors"
    elif catalog.is_lone_file:
        names, detail = [catalog.file], f"{catalog.file} against size and CRC32 in {MANIFEST}"
    else:
        detail = f"{len(manifest.files)} files against size and CRC32 in {MANIFEST}"
        detail += ", rewritten by --accept" if manifest.accepted else ""
    problems = file_problems(catalog.store, names, manifest=manifest)
    return judge("files", detail, with_names(problems)), problems


def _check_without_manifest(catalog: Catalog, *, quick: bool) -> Check:
    if downloaded := [] if quick else check_downloaded(catalog.root, [catalog.file] if catalog.is_lone_file else None):
        return downloaded[0]
    if not CONTAINERS[catalog.container].has_checksums:
        return Check("files", "not possible", f"{catalog.container} carries no checksums, and there is no {MANIFEST}")
    if quick:
        return Check("files", "not done", "no item was compared with its CRC32 (--quick)")
    return check_items(catalog)


def _check_values(
    catalog: Catalog, manifest: Manifest | None, rules: DigestRules, advance: Callable[[int], None]
) -> tuple[Check, dict[str, int]]:
    """Read every tensor as a reader would, and compare with dtype, shape and digest of the manifest."""
    listed = {fqn: manifest.tensors[fqn] for fqn in catalog.tensors} if manifest else {}
    read = read_tensors(catalog, rules, listed, advance)
    problems, total = list(read.damaged), len(catalog.tensors)
    if manifest or not CONTAINERS[catalog.container].keeps_state:
        problems += read.unsupported
    if manifest:
        compared = {fqn: entry for fqn, entry in listed.items() if fqn in read.entries}
        problems += [f"{fqn}: {how}" for fqn, how in changed_tensors(compared, read.entries).items()]
    if problems:
        return Check("values", "failed", "tensors as a reader gets them", tuple(problems)), read.non_finite
    if manifest is None:
        num_read = f"{len(read.entries):,} of {total:,}" if read.unsupported else f"all {total:,}"
        detail = f"{num_read} tensors can be read, but there is no {MANIFEST} to compare them with"
        return Check("values", "not possible", detail), read.non_finite
    if without := sum(not entry.digest for entry in listed.values()):  # only the CRC32 of their files can be compared
        detail = f"{without:,} of {total:,} tensors have no digest: written with --no-digest"
        return Check("values", "not possible" if without == total else "warning", detail), read.non_finite
    return Check("values", "ok", f"{total:,} tensors against their digests"), read.non_finite
