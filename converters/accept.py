"""`titan verify --accept`: check a folder that was changed after titan wrote it, then rewrite its manifest."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import (
    HF_CONFIG,
    HF_GENERATION_CONFIG,
    HF_INDEX,
    MANIFEST,
    META_PARAMS,
    MODEL_INFO,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
)
from converters.containers.registry import CONTAINERS
from converters.conversion.execute import Progress, no_progress
from converters.engine.read import CatalogReader
from converters.integrity.checks import (
    check_container,
    check_items,
    check_model,
    check_reading,
    check_structure,
    judge,
    read_through,
)
from converters.integrity.verify_report import Changes, Check, VerifyReport
from converters.source.models_inside import ROOT
from converters.source.open import open_checkpoint, require_exists
from converters.store.commit import find_complete, fsync_folder
from converters.store.json_file import read_json
from converters.store.manifest import (
    FileSum,
    Manifest,
    OtherVersion,
    TensorSum,
    files_to_keep,
    in_threads,
    read_manifest,
    sum_file,
    write_manifest,
)
from converters.store.paths import refuse_links_out
from converters.store.replace_file import fsync
from converters.views.catalog import Catalog

_READ_AS_JSON = {
    HF_CONFIG, HF_GENERATION_CONFIG, HF_INDEX, META_PARAMS, MODEL_INFO, TOKENIZER_CONFIG, TOKENIZER_JSON,
}  # fmt: skip


def accept(
    path: Path | str,
    *,
    select: str | None = None,
    model_from: Path | str | None = None,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Check a folder without its manifest, compare it with the manifest, and replace the manifest by one rename.

    Where a check fails the report says so and the manifest is not changed. Raises CheckpointError where there is no
    manifest, and where files change meanwhile. A flipped bit of a safetensors file cannot be distinguished from an
    intended change: the report lists every tensor whose values differ.
    """
    path = Path(path)
    require_exists(path)
    folder = find_complete(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: is a file", hint="--accept takes the folder", tries=[f"{path.parent} --accept"])
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: has no {MANIFEST}, so there is nothing to accept",
            hint="a folder without a manifest needs no --accept",
            tries=[f"titan verify {path}"],
        )
    before = _states(folder)
    old, unreadable = _read_old(folder)
    try:
        catalog = open_checkpoint(folder, select=select or (ROOT if old.selected else None), against_manifest=False)
    except CheckpointError as error:
        hints = tuple(line for line in (error.hint, *error.tries) if line)
        return VerifyReport(str(path), "", (Check("structure", "failed", error.message, hints),), 0, 0, {})
    checks = [check_structure(catalog), _check_json(folder, before)]
    if CONTAINERS[catalog.container].has_checksums:
        checks.append(check_items(catalog, remark=f"{MANIFEST} is being replaced"))
    checks += check_container(catalog, is_folder=True)
    checks += check_reading(catalog)
    model_check, rules = check_model(catalog, model_from)
    checks.append(model_check)
    if any(check.outcome == "failed" for check in checks):  # reading damaged files would add nothing
        return _report(path, catalog, checks, {}, None)
    non_finite: dict[str, int] = {}
    with progress(catalog.num_bytes, "reading") as advance, CatalogReader(catalog) as reader:
        tensors = {}
        for fqn, info in reader.tensors.items():
            source = rules.source_for(reader, fqn, None)
            digest, count = read_through(source, fqn, rules.native_rows, advance)
            of = source.tensors[fqn]
            dtype, shape = of.dtype if of.dtype != info.dtype else "", of.shape if of.shape != info.shape else ()
            tensors[fqn] = TensorSum(info.dtype, info.shape, digest, dtype, shape)
            non_finite |= {fqn: count} if count else {}
    sums = dict(zip(before, in_threads([partial(sum_file, folder / name) for name in before]), strict=True))
    if unreadable:
        changes = Changes({}, {}, len(tensors), unreadable)
        checks.append(Check("manifest", "warning", "nothing could be compared with the old one", (unreadable,)))
    else:
        files = _changed_files(old.files, sums)
        changes = Changes(files, _changed_tensors(old.tensors, tensors, catalog, files), len(tensors))
        checks += [_compare("files", len(sums), files), _compare("values", len(tensors), changes.tensors)]
    if _states(folder) != before:
        raise CheckpointError(
            f"{folder}: files changed while they were being checked", hint=f"{MANIFEST} was not changed"
        )
    if changes.files or changes.tensors or unreadable:
        fsync_folder(folder)  # the files are on the disk before the manifest is
        write_manifest(folder, tensors=tensors, files=sums, accepted=True, selected=old.selected)
        fsync(folder)
    return _report(path, catalog, checks, non_finite, changes)


def _report(
    path: Path, catalog: Catalog, checks: list[Check], non_finite: dict[str, int], changes: Changes | None
) -> VerifyReport:
    num_tensors = len(catalog.tensors)
    return VerifyReport(
        str(path), catalog.container, tuple(checks), num_tensors, catalog.num_bytes, non_finite, changes
    )


def _states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """File → size, time and inode, for every file that a manifest lists. Raises where one is not a regular file."""
    names = files_to_keep(folder)
    refuse_links_out(folder, [folder / name for name in names])
    if odd := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: not regular files:{list_offenders(odd)}")
    status = {name: (folder / name).stat() for name in names}
    return {name: (s.st_size, s.st_mtime_ns, s.st_ino) for name, s in status.items()}


def _read_old(folder: Path) -> tuple[Manifest, str]:
    """The manifest, or an empty one and why it cannot be read."""
    try:
        return read_manifest(folder) or Manifest({}, {}), ""
    except OtherVersion:
        raise
    except CheckpointError as error:
        return Manifest({}, {}), error.message


def _check_json(folder: Path, names: Mapping[str, object]) -> Check:
    problems = []
    jsons = [name for name in names if Path(name).name in _READ_AS_JSON]
    for name in jsons:
        try:
            read_json(folder / name)
        except CheckpointError as error:
            problems.append(error.message)
    return judge("json", f"{len(jsons)} JSON files can be read", problems)


def _changed_files(old: Mapping[str, FileSum], new: Mapping[str, FileSum]) -> dict[str, str]:
    changed = {}
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            changed[name] = "removed"
        elif name not in old:
            changed[name] = "added"
        elif new[name].size != old[name].size:
            changed[name] = f"{new[name].size:,} bytes instead of {old[name].size:,}"
        elif new[name] != old[name]:
            changed[name] = "its bytes have changed"
    return changed


def _changed_tensors(
    old: Mapping[str, TensorSum], new: Mapping[str, TensorSum], catalog: Catalog, files: Mapping[str, str]
) -> dict[str, str]:
    changed = {fqn: "gone" for fqn in old if fqn not in new}
    for fqn, entry in new.items():
        if fqn not in old:
            changed[fqn] = "new"
            continue
        was = old[fqn]
        if (was.dtype, was.shape) != (entry.dtype, entry.shape):
            changed[fqn] = f"{entry.dtype} {list(entry.shape)} instead of {was.dtype} {list(was.shape)}"
        elif was.digest and was.digest != entry.digest:
            changed[fqn] = "its values have changed"
        elif not was.digest and any(chunk.file in files for chunk in catalog.tensors[fqn].chunks):
            changed[fqn] = "its file has changed, and it has no digest to compare its values with"
    return changed


def _compare(name: str, total: int, changed: Mapping[str, str]) -> Check:
    what = "tensors" if name == "values" else "files"
    if not changed:
        return Check(name, "ok", f"all {total:,} {what} are as titan wrote them")
    detail = f"{len(changed):,} differ from what titan wrote; now {total:,} {what}"
    return Check(name, "changed", detail, tuple(f"{key}: {how}" for key, how in changed.items()))
