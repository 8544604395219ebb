"""`titan verify --accept` after the checks: compare with the old manifest, and replace it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

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
from converters.integrity.checks import changed_tensors, judge
from converters.integrity.verify_report import Changes, Check
from converters.store.base import Store, open_store
from converters.store.json_file import read_json
from converters.store.local_files import is_file
from converters.store.location import Location
from converters.store.manifest import (
    Manifest,
    OtherVersion,
    TensorSum,
    file_problems,
    files_to_keep,
    in_threads,
    read_manifest,
    sum_range,
)
from converters.store.output import write_manifest
from converters.store.outputs import checked, run_outputs_at
from converters.store.paths import NotAFile, checked_file_name, refuse_links_out
from converters.views.catalog import Catalog

_READ_AS_JSON = {
    HF_CONFIG, HF_GENERATION_CONFIG, HF_INDEX, META_PARAMS, MODEL_INFO, TOKENIZER_CONFIG, TOKENIZER_JSON,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChangedFolder:
    """A folder that was changed after titan wrote it, as it is before the checks."""

    store: Store
    sizes: Mapping[str, int]  # of every file that a manifest lists
    identities: Mapping[str, tuple[str | int, ...]]  # of the same files
    manifest: Manifest  # the old one; empty if it cannot be read
    unreadable: str  # why the old manifest cannot be read, or ""


def changed_folder(path: Location) -> ChangedFolder:
    """Read the old manifest. Raises CheckpointError if there is none, or if a file is not a regular one."""
    store, file = open_store(path)
    if file:
        raise CheckpointError(f"{path}: is a file", hint="--accept takes the folder", tries=[f"{path.parent} --accept"])
    folder = store.local([MANIFEST])
    if not is_file(folder / MANIFEST):
        raise CheckpointError(
            f"{path}: has no {MANIFEST}, so there is nothing to accept",
            hint="a folder without a manifest needs no --accept",
            tries=[f"titan verify {path}"],
        )
    sizes, identities = _states(store)
    try:
        return ChangedFolder(store, sizes, identities, read_manifest(folder) or Manifest({}, {}), "")
    except OtherVersion:
        raise
    except CheckpointError as error:
        return ChangedFolder(store, sizes, identities, Manifest({}, {}), error.message)


def check_json(folder: ChangedFolder) -> Check:
    """Whether the JSON files, which were perhaps edited, can be read."""
    problems = []
    names = [name for name in folder.sizes if name.rpartition("/")[2] in _READ_AS_JSON]
    copies = folder.store.local(names)
    for name in names:
        try:
            read_json(copies / name)
        except CheckpointError as error:
            problems.append(error.message)
    return judge("json", f"{len(names)} JSON files can be read", problems)


def accept_changes(
    folder: ChangedFolder, catalog: Catalog, tensors: Mapping[str, TensorSum]
) -> tuple[list[Check], Changes]:
    """List what differs from the old manifest, and replace it if anything does.

    Raises CheckpointError if files have changed since `changed_folder`. A flipped bit of a safetensors file cannot be
    distinguished from an intended change: every tensor whose values differ is listed.
    """
    old, files, values = folder.manifest, dict[str, str](), dict[str, str]()
    checks = [Check("manifest", "warning", "nothing could be compared with the old one", (folder.unreadable,))]
    if not folder.unreadable:
        files = file_problems(folder.store, manifest=old)
        values = changed_tensors(old.tensors, tensors)
        for fqn in old.tensors.keys() & tensors.keys():
            if not old.tensors[fqn].digest and any(chunk.file in files for chunk in catalog.tensors[fqn].chunks):
                values.setdefault(fqn, "its file has changed, and it has no digest to compare its values with")
        checks = [
            _judge("files", f"{len(folder.sizes):,} files", files),
            _judge("values", f"{len(tensors):,} tensors", values),
        ]
    if files or values or folder.unreadable:
        same = {name: entry for name, entry in old.files.items() if name not in files}
        changed_files = {name: size for name, size in folder.sizes.items() if name not in same}
        sums = in_threads([partial(sum_range, folder.store, name, 0, size) for name, size in changed_files.items()])
        location = folder.store.location
        output = checked(run_outputs_at(location).existing(location), location)
        if _states(folder.store) != (folder.sizes, folder.identities):
            raise CheckpointError(
                f"{location}: files changed while they were being checked", hint=f"{MANIFEST} was not changed"
            )
        sums_by_name = same | dict(zip(changed_files, sums, strict=True))
        write_manifest(output, tensors=tensors, files=sums_by_name, accepted=True, selected=old.selected)
    return checks, Changes(files, values, len(tensors), folder.unreadable)


def _judge(name: str, what: str, changed: Mapping[str, str]) -> Check:
    if not changed:
        return Check(name, "ok", f"all {what} are as titan wrote them")
    problems = tuple(f"{key}: {how}" for key, how in changed.items())
    return Check(name, "changed", f"{len(changed):,} differ from what titan wrote; now {what}", problems)


def _states(store: Store) -> tuple[dict[str, int], dict[str, tuple[str | int, ...]]]:
    """Size and identity of every file that a manifest lists."""
    names, folder = files_to_keep(store), store.local()
    refuse_links_out(folder, [folder / name for name in names])
    for part in (part for name in names for part in name.split("/")):
        checked_file_name(part, what=f"{MANIFEST} of {store.location}")
    sizes, odd = dict[str, int](), list[str]()
    for name in names:
        try:
            sizes[name] = store.size(name)
        except NotAFile:
            odd.append(name)
    if odd:
        raise CheckpointError(f"{store.location}: not regular files:{list_offenders(odd)}")
    return sizes, {name: store.identity(name) for name in names}
