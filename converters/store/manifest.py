"""`titan_manifest.json`: the files and tensors of a complete checkpoint with their checksums. Written last.

Its first line is the CRC32 of all bytes after that line, so that a flipped bit in the manifest is found, too.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from converters.common.crc import crc32, join_crc32
from converters.common.errors import CheckpointError, Damaged, in_words, list_offenders
from converters.common.names import EDITABLE, MANIFEST
from converters.common.threads import deferred_signals
from converters.store.base import Store
from converters.store.digest import sum_of_rows
from converters.store.folder import FolderStore
from converters.store.location import Location
from converters.store.paths import NotAFile, checked_file_name, refuse_links_out

VERSION = 2
_TEMPORARY = MANIFEST + ".tmp"
_READ_BYTES = 1 << 20  # per reader: ranks check files before they load a model
_PART_BYTES = 256 << 20  # parts of a large file that threads sum
_NUM_READERS = 4
_SMALL_BYTES = 16 << 20  # files up to this size are read for an error's list
_REWRITE = "the manifest is damaged or was edited: use another copy, or check the files and rewrite it"
T = TypeVar("T")
_FIRST_LINE = re.compile(rb'\{"crc32": (0|[1-9]\d*),\n')


class OtherVersion(Damaged):
    """A manifest of another version, or one whose version number is damaged."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size and the CRC32 of all its bytes."""

    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TensorSum:
    """A tensor in the manifest. `digest` is "" if none was computed (see digest.py).

    `digest_dtype` and `digest_shape`: of the values that the digest is of, if they are not `dtype` and `shape`:
    those of codes times scales.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    digest_dtype: str = ""
    digest_shape: tuple[int, ...] = ()

    @property
    def values_shape(self) -> tuple[int, ...]:
        return self.digest_shape or self.shape

    @property
    def sum_of_rows(self) -> int:
        """The digest without the hash of dtype and shape (digest.sum_of_rows)."""
        return sum_of_rows(self.digest, self.digest_dtype or self.dtype, self.values_shape)


class DoAll(Protocol):
    """Runs all of `works` in any order and returns their results in the order of `works`."""

    def __call__(self, works: Sequence[Callable[[], T]]) -> list[T]: ...


@dataclass(frozen=True, slots=True)
class Manifest:
    """Tensors by FQN, files by their path inside the folder (with `/`).

    `accepted`: it was rewritten after a change: it describes what the user accepted, not what titan wrote.
    `selected`: the place, in the source, of the model that the weights are; "" if the source held one model.
    """

    tensors: Mapping[str, TensorSum]
    files: Mapping[str, FileSum]
    accepted: bool = False
    selected: str = ""


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if it has none (a checkpoint that someone else wrote)."""
    path, tries = folder / MANIFEST, [f"titan verify {folder} --accept"]
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: is not JSON: {in_words(error)}", hint=_REWRITE, tries=tries) from error
    try:
        if not _matches_itself(raw, content):
            raise Damaged(f"{path}: does not match its own CRC32", hint=_REWRITE, tries=tries)
        tensors = {
            k: TensorSum(
                t["dtype"], tuple(t["shape"]), t["digest"], t.get("digest_dtype", ""), tuple(t.get("digest_shape", ()))
            )
            for k, t in content["tensors"].items()
        }
        files = {k: FileSum(f["size"], f["crc32"]) for k, f in content["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: damaged ({in_words(error)})", hint=_REWRITE, tries=tries) from error
    for name in files:
        for part in name.split("/"):
            checked_file_name(part, what=str(path))
    return Manifest(tensors, files, content.get("accepted") is True, str(content.get("selected", "")))


def _matches_itself(raw: bytes, content: dict[str, Any]) -> bool:
    claimed, version = content.pop("crc32"), content["version"]
    if version == 1:  # of the first version: over the content, in any formatting
        canonical = {key: content[key] for key in sorted(content)}
        return bool(claimed == crc32(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()))
    if version != VERSION:
        raise OtherVersion(f"{MANIFEST}: version {version!r}; this titan knows version {VERSION}")
    first = _FIRST_LINE.match(raw)
    return first is not None and int(first[1]) == crc32(memoryview(raw)[first.end() :])


def dump_manifest(manifest: Manifest) -> bytes:
    """The file's content: the first line, then one line for each tensor and file, for people and diff tools."""
    tensors = [
        f"  {json.dumps(fqn)}: "
        + json.dumps(
            {"dtype": entry.dtype, "shape": list(entry.shape), "digest": entry.digest}
            | ({"digest_dtype": entry.digest_dtype} if entry.digest_dtype else {})
            | ({"digest_shape": list(entry.digest_shape)} if entry.digest_shape else {})
        )
        for fqn, entry in manifest.tensors.items()
    ]
    files = [
        f'  {json.dumps(name)}: {{"size": {entry.size}, "crc32": {entry.crc32}}}'
        for name, entry in manifest.files.items()
    ]
    lines = [
        f' "version": {VERSION},',
        *([' "accepted": true,'] if manifest.accepted else []),
        *([f' "selected": {json.dumps(manifest.selected)},'] if manifest.selected else []),
        ' "tensors": {',
        ",\n".join(tensors),
        " },",
        ' "files": {',
        ",\n".join(files),
    ]
    body = "\n".join([*lines, " }", "}", ""]).encode()
    return b'{"crc32": %d,\n' % crc32(body) + body


def check_sizes(place: Path | Store) -> Manifest | None:
    """Read the manifest and compare the sizes of its files: cheap enough for every open.

    Raises CheckpointError if one differs.
    """
    store = _store_of(place)
    manifest = read_manifest(folder := store.local([MANIFEST]))
    if manifest is not None and (broken := _size_problems(store, manifest, manifest.files)):
        small = [name for name, entry in manifest.files.items() if name not in broken and entry.size <= _SMALL_BYTES]
        refuse_links_out(folder, [folder / name for name in small])  # no file of another folder is read
        problems = broken | file_problems(store, small, manifest=manifest) | _added_files(store, manifest)
        raise changed_since(store.location, with_names(problems))
    return manifest


def changed_since(folder: Path | Location, problems: Sequence[str], *, lost: str = "") -> Damaged:
    """The error for a folder that differs from what titan wrote, on purpose or by damage."""
    return Damaged(
        f"{folder}: changed or damaged since titan wrote it:{list_offenders(problems)}",
        hint=f"if the change was intended, accept it, which checks the files and rewrites {MANIFEST}; if not, use "
        f"another copy{lost}",
        tries=[f"titan verify {folder}", f"titan verify {folder} --accept"],
    )


def in_threads(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run `works` in a few threads and return their results."""
    results = []
    with deferred_signals() as deliver_signals, ThreadPoolExecutor(_NUM_READERS) as pool:
        for result in pool.map(lambda work: work(), works):
            deliver_signals()
            results.append(result)
    return results


def _store_of(place: Path | Store) -> Store:
    return FolderStore(place) if isinstance(place, Path) else place


def with_names(problems: Mapping[str, str]) -> list[str]:
    """Problems by file as lines."""
    return [f"{name}: {problem}" for name, problem in problems.items()]


def check_files(
    place: Path | Store,
    names: Iterable[str] | None = None,
    *,
    manifest: Manifest | None = None,
    do_all: DoAll = in_threads,
) -> list[str]:
    """The lines of `file_problems`."""
    return with_names(file_problems(place, names, manifest=manifest, do_all=do_all))


def file_problems(
    place: Path | Store,
    names: Iterable[str] | None = None,
    *,
    manifest: Manifest | None = None,
    do_all: DoAll = in_threads,
) -> dict[str, str]:
    """Read the files of the manifest (or just `names`) and return what is wrong by file; {} when all is well.

    `manifest`: the folder's, if it has been read already. `do_all` does the reading, a part of a file with each
    call: processes may share it.
    """
    store = _store_of(place)
    manifest = manifest or read_manifest(store.local([MANIFEST]))
    if manifest is None:
        raise CheckpointError(f"{store.location}: has no {MANIFEST}, so there is nothing to compare its files with")
    wanted = list(manifest.files if names is None else names)
    broken = _size_problems(store, manifest, wanted)
    problems = dict(broken)
    whole = [name for name in wanted if name not in broken]
    parts = [(name, start) for name in whole for start in range(0, manifest.files[name].size or 1, _PART_BYTES)]
    sums = dict.fromkeys(whole, 0)
    reads = [partial(_sum_part, store, name, start, manifest.files[name].size) for name, start in parts]
    for (name, _), part in zip(parts, do_all(reads), strict=True):
        sums[name] = join_crc32(sums[name], part.crc32, part.size)
    for name in whole:
        if sums[name] != manifest.files[name].crc32:
            problems[name] = "its bytes have changed (CRC32)"
    return problems if names is not None else problems | _added_files(store, manifest)


def _added_files(store: Store, manifest: Manifest) -> dict[str, str]:
    return {name: "not in the manifest" for name in files_to_keep(store) if name not in manifest.files}


def is_kept(name: str) -> bool:
    """Whether a file belongs in the manifest: not the manifest itself, nor what users edit."""
    return name not in (MANIFEST, _TEMPORARY, *EDITABLE)


def list_files(place: Path | Store) -> list[str]:
    """Every file of a folder but the manifest itself, as paths with `/`, sorted."""
    return [name for name in _store_of(place).walk() if name not in (MANIFEST, _TEMPORARY)]


def files_to_keep(place: Path | Store) -> list[str]:
    """The files that must not change: all but those that users edit."""
    return [name for name in list_files(place) if is_kept(name)]


def sum_file(path: Path) -> FileSum:
    """Read a file in blocks and sum it."""
    store = _store_of(path.parent)
    return sum_range(store, path.name, 0, store.size(path.name))


def _sum_part(store: Store, name: str, start: int, size: int) -> FileSum:
    return sum_range(store, name, start, min(_PART_BYTES, size - start))


def sum_range(store: Store, name: str, start: int, num_bytes: int) -> FileSum:
    """Read `num_bytes` of a file from `start` on in blocks and sum them."""
    crc, buffer = 0, memoryview(bytearray(min(_READ_BYTES, num_bytes)))
    for position in range(0, num_bytes, _READ_BYTES):
        part = buffer[: num_bytes - position]
        store.read_into(name, start + position, part)
        crc = crc32(part, crc)
    return FileSum(num_bytes, crc)


def _size_problems(store: Store, manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
    """File → problem, for files that are missing or have another size than in the manifest."""
    problems = {}
    for name in names:
        try:
            size = store.size(name)
        except NotAFile as error:  # reading a pipe or a device would not end
            problems[name] = str(error.reason)
            continue
        if size != manifest.files[name].size:
            problems[name] = f"{size:,} bytes instead of {manifest.files[name].size:,}"
    return problems
