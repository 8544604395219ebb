"""`titan_manifest.json`: what a complete checkpoint consists of. Written last, so it vouches for everything else."""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from converters.errors import CheckpointError, in_words, list_offenders
from converters.names import MANIFEST

VERSION = 1
_READ_BYTES = 8 << 20
_NUM_READERS = 4


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size and the CRC32 of all its bytes."""

    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TensorSum:
    """A tensor as the manifest remembers it. `digest` is "" where none was asked for (see digest.py)."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Tensors by FQN, files by their path inside the folder (with `/`)."""

    tensors: Mapping[str, TensorSum]
    files: Mapping[str, FileSum]


def write_manifest(
    folder: Path, *, tensors: Mapping[str, TensorSum], files: Mapping[str, FileSum] | None = None
) -> Manifest:
    """Write the manifest of all files in `folder`; those that `files` does not know are read once. Call it last."""
    known = dict(files or {})
    found = {name: known.get(name) or sum_file(folder / name) for name in list_files(folder)}
    if absent := sorted(known.keys() - found.keys()):
        raise CheckpointError(f"{folder}: files of the manifest are not there:{list_offenders(absent)}")
    manifest = Manifest(dict(tensors), found)
    body = {
        "version": VERSION,
        "tensors": {fqn: asdict(t) for fqn, t in manifest.tensors.items()},
        "files": {name: asdict(f) for name, f in found.items()},
    }
    temporary = folder / (MANIFEST + ".tmp")
    with temporary.open("w") as file:
        json.dump({"crc32": _body_crc32(body), **body}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MANIFEST)
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where it has none (a checkpoint that someone else wrote)."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {in_words(error)}", hint="the manifest is damaged") from error
    try:
        claimed = content.pop("crc32")
        if content["version"] != VERSION:
            raise CheckpointError(f"{path}: version {content['version']!r}; this titan knows version {VERSION}")
        if claimed != _body_crc32(content):
            raise CheckpointError(f"{path}: does not match its own CRC32", hint="the manifest is damaged or was edited")
        return Manifest(
            {k: TensorSum(t["dtype"], tuple(t["shape"]), t["digest"]) for k, t in content["tensors"].items()},
            {k: FileSum(f["size"], f["crc32"]) for k, f in content["files"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged ({in_words(error)})") from error


def check_sizes(folder: Path) -> Manifest | None:
    """Read the manifest and compare the sizes of its files: cheap enough for every open. Raises where one is off."""
    manifest = read_manifest(folder)
    if manifest is not None and (problems := _size_problems(folder, manifest, manifest.files)):
        raise CheckpointError(
            f"{folder}: the checkpoint is not whole:{list_offenders(problems)}",
            hint="its manifest lists other files than there are; use another copy of it",
        )
    return manifest


def check_files(folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Read the files of the manifest (or just `names`) and return what is wrong with each; [] when all is well."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"{folder}: has no {MANIFEST}, so there is nothing to compare its files with")
    wanted = {name: manifest.files[name] for name in (manifest.files if names is None else names)}
    problems = _size_problems(folder, manifest, wanted)
    broken = {problem.split(":", 1)[0] for problem in problems}
    whole = [name for name in wanted if name not in broken]
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        for name, found in zip(whole, pool.map(lambda name: sum_file(folder / name), whole), strict=True):
            if found.crc32 != wanted[name].crc32:
                problems.append(f"{name}: its bytes have changed (CRC32)")
    if names is None:
        strangers = [name for name in list_files(folder) if name not in manifest.files]
        problems += [f"{name}: not in the manifest" for name in strangers]
    return problems


def list_files(folder: Path) -> list[str]:
    """Every file below `folder` but the manifest itself, as paths with `/`, sorted."""
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()]
    return sorted(name for name in names if name not in (MANIFEST, MANIFEST + ".tmp"))


def sum_file(path: Path) -> FileSum:
    """Read a file in blocks and sum it."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            crc = crc32(block, crc)
            size += len(block)
    return FileSum(size, crc)


def _size_problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    problems = []
    for name in names:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            problems.append(f"{name}: missing")
            continue
        if size != manifest.files[name].size:
            problems.append(f"{name}: {size:,} bytes instead of {manifest.files[name].size:,}")
    return problems


def _body_crc32(body: Mapping[str, Any]) -> int:
    canonical = {key: body[key] for key in sorted(body)}
    return crc32(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())
