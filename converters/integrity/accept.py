"""`titan verify --accept` after the checks: compare with the old manifest, and replace it by one rename."""

from collections.abc import Mapping
from dataclasses import dataclass
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
from converters.integrity.checks import changed_tensors, judge
from converters.integrity.verify_report import Changes, Check
from converters.store.commit import find_complete, fsync_folder
from converters.store.folder_output import FolderOutput
from converters.store.json_file import read_json
from converters.store.local_files import is_file, stamp
from converters.store.manifest import (
    Manifest,
    OtherVersion,
    TensorSum,
    check_files,
    files_to_keep,
    in_threads,
    read_manifest,
    sum_file,
)
from converters.store.output import write_manifest
from converters.store.paths import refuse_links_out
from converters.store.replace_file import fsync
from converters.views.catalog import Catalog

_READ_AS_JSON = {
    HF_CONFIG, HF_GENERATION_CONFIG, HF_INDEX, META_PARAMS, MODEL_INFO, TOKENIZER_CONFIG, TOKENIZER_JSON,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChangedFolder:
    """A folder that was changed after titan wrote it, as it is before the checks."""

    path: Path
    states: Mapping[str, tuple[int, int, int]]  # every file that a manifest lists → size, time and inode
    manifest: Manifest  # the old one; empty if it cannot be read
    unreadable: str  # why the old manifest cannot be read, or ""


def changed_folder(path: Path) -> ChangedFolder:
    """Read the old manifest. Raises CheckpointError if there is none, or if a file is not a regular one."""
    folder = find_complete(path)
    if is_file(folder):
        raise CheckpointError(f"{path}: is a file", hint="--accept takes the folder", tries=[f"{path.parent} --accept"])
    if not is_file(folder / MANIFEST):
        raise CheckpointError(
            f"{path}: has no {MANIFEST}, so there is nothing to accept",
            hint="a folder without a manifest needs no --accept",
            tries=[f"titan verify {path}"],
        )
    states = _states(folder)
    try:
        return ChangedFolder(folder, states, read_manifest(folder) or Manifest({}, {}), "")
    except OtherVersion:
        raise
    except CheckpointError as error:
        return ChangedFolder(folder, states, Manifest({}, {}), error.message)


def check_json(folder: ChangedFolder) -> Check:
    """Whether the JSON files, which were perhaps edited, can be read."""
    problems = []
    names = [name for name in folder.states if Path(name).name in _READ_AS_JSON]
    for name in names:
        try:
            read_json(folder.path / name)
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
        files = dict(problem.split(": ", 1) for problem in check_files(folder.path, manifest=old))
        values = changed_tensors(old.tensors, tensors)
        for fqn in old.tensors.keys() & tensors.keys():
            if not old.tensors[fqn].digest and any(chunk.file in files for chunk in catalog.tensors[fqn].chunks):
                values.setdefault(fqn, "its file has changed, and it has no digest to compare its values with")
        checks = [
            _judge("files", f"{len(folder.states):,} files", files),
            _judge("values", f"{len(tensors):,} tensors", values),
        ]
    if files or values or folder.unreadable:
        same = {name: entry for name, entry in old.files.items() if name not in files}
        changed_files = [name for name in folder.states if name not in same]
        sums = in_threads([partial(sum_file, folder.path / name) for name in changed_files])
        fsync_folder(folder.path)  # the files are on the disk before the manifest is
        if _states(folder.path) != folder.states:
            raise CheckpointError(
                f"{folder.path}: files changed while they were being checked", hint=f"{MANIFEST} was not changed"
            )
        sums_by_name = same | dict(zip(changed_files, sums, strict=True))
        output = FolderOutput(folder.path)
        write_manifest(output, tensors=tensors, files=sums_by_name, accepted=True, selected=old.selected)
        fsync(folder.path)
    return checks, Changes(files, values, len(tensors), folder.unreadable)


def _judge(name: str, what: str, changed: Mapping[str, str]) -> Check:
    if not changed:
        return Check(name, "ok", f"all {what} are as titan wrote them")
    problems = tuple(f"{key}: {how}" for key, how in changed.items())
    return Check(name, "changed", f"{len(changed):,} differ from what titan wrote; now {what}", problems)


def _states(folder: Path) -> dict[str, tuple[int, int, int]]:
    names = files_to_keep(folder)
    refuse_links_out(folder, [folder / name for name in names])
    if odd := [name for name in names if not is_file(folder / name)]:
        raise CheckpointError(f"{folder}: not regular files:{list_offenders(odd)}")
    return {name: stamp(folder / name) for name in names}
