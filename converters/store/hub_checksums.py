"""Checksums that a download from the Hugging Face hub leaves on disk, and how to fetch a damaged file again.

Hub and client name a file by its ETag: SHA-256 of a large file (LFS), git's SHA-1 of any other. The cache has it as
the name of the blob that a snapshot links to; a folder (`hf download --local-dir`, `titan download REPOSITORY DST`) in

.cache/huggingface/download/NAME.metadata    three lines: commit, ETag, time of the download
"""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.store.hf_cache import blob_of, folder_of, repository_of

_ETAG = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_RECORDS = Path(".cache", "huggingface", "download")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record of a download about a file. `etag` has one of the two forms that can be computed."""

    commit: str
    etag: str


def is_computable(etag: str) -> bool:
    """Whether an ETag is a checksum of the content. Those of some mirrors are not."""
    return _ETAG.fullmatch(etag) is not None


def has_content(path: Path, etag: str, *, advance: Callable[[int], None] = lambda num_bytes: None) -> bool:
    """Whether the content of a file is that of a computable ETag. A missing file has none."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            is_git = len(etag) == 40
            sum_ = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if is_git else hashlib.sha256()
            while block := file.read(_BLOCK_BYTES):
                sum_.update(block)
                advance(len(block))
    except FileNotFoundError:
        return False
    return sum_.hexdigest() == etag


def recorded_files(folder: Path) -> dict[str, Recorded]:
    """The files of a snapshot of the cache, or of a downloaded folder, by their names in it, with `/`; else {}.

    Files that are listed may be missing; files without a computable ETag are left out.
    """
    if repository := repository_of(folder):
        links = {p.relative_to(folder).as_posix(): blob for p in folder.rglob("*") if (blob := blob_of(p, repository))}
        commit = _commit_of(folder, repository)
        return {name: Recorded(commit, blob.name) for name, blob in links.items() if is_computable(blob.name)}
    records = folder / _RECORDS
    named = {p.relative_to(records).as_posix().removesuffix(".metadata"): p for p in records.rglob("*.metadata")}
    read = {name: _read(path) for name, path in named.items()}
    return {name: record for name, record in read.items() if record}


def _commit_of(folder: Path, repository: Path) -> str:
    """The commit of the snapshot that contains `folder`."""
    return Path(os.path.realpath(folder)).relative_to(repository / "snapshots").parts[0]


def _read(path: Path) -> Recorded | None:
    try:
        commit, etag, *_ = path.read_text(errors="replace").split("\n")
    except (OSError, ValueError):
        return None
    return Recorded(commit.strip(), etag.strip()) if is_computable(etag.strip()) else None


def record_file(folder: Path, name: str, recorded: Recorded, time: float) -> None:
    """Record a downloaded file of a folder, as the hub's client does."""
    path = folder / _RECORDS / f"{name}.metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{recorded.commit}\n{recorded.etag}\n{time}\n")
    (folder / _RECORDS.parent / ".gitignore").write_text("*")


def fetch_again(path: Path) -> dict[str, Any]:
    """`hint` and `tries` of an error about a damaged file of a download, or its folder; {} for other files."""
    folder = folder_of(path)
    if repository := repository_of(folder):
        name = repository.name.removeprefix("models--").replace("--", "/")
        commit = _commit_of(folder, repository)
        branch = repository / "refs" / "main"
        is_main = branch.is_file() and branch.read_text(errors="replace").strip() == commit
        cache = "" if repository.parent == default_cache() else f"HF_HUB_CACHE={repository.parent} "
        command = f"{cache}titan download {name}" + ("" if is_main else f" --revision {commit}")
        hint = "this command compares every file with the hub's checksum and fetches what is damaged again"
        return {"hint": hint, "tries": [command]}
    if recorded := recorded_files(folder):
        commit = next(iter(recorded.values())).commit
        return {
            "hint": "it was downloaded from the hub: `titan download` with the repository's name and this folder "
            "compares every file with the hub's checksum and fetches what is damaged again",
            "tries": [f"titan download OWNER/NAME {folder} --revision {commit}"],
        }
    return {}


def default_cache() -> Path:
    """The cache folder of the hub's client (huggingface_hub.constants), resolved."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    return Path(os.path.realpath(cache.expanduser()))
