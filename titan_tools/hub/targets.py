"""Targets of a download: the Hugging Face cache, or a plain folder."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Protocol

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.file_download import repo_folder_name

from converters.common.errors import CheckpointError, list_offenders
from converters.containers.registry import replaceable
from converters.store.commit import check_destination, commit
from converters.store.hub_checksums import Recorded, record_file, recorded_files
from titan_tools.hub.fetch import check_sum

PART_SUFFIX = ".incomplete"
REPLACED_SUFFIX = ".replaced"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at one commit."""

    name: str
    num_bytes: int
    etag: str  # SHA-256 of a large file (LFS), else git's SHA-1
    num_bytes_here: int = 0  # already downloaded; equal to num_bytes: complete and checked


class DownloadTarget(Protocol):
    """The target of a download: the HF cache, or a plain folder."""

    path: Path  # the finished checkpoint folder

    def places(self, name: str, etag: str) -> list[Path]:
        """The paths at which earlier downloads have put the file, which may be damaged, or links to nowhere."""

    def discard(self, place: Path) -> None:
        """Take a damaged file away, so that no command reads it."""

    def part(self, name: str, etag: str) -> Path:
        """The partial file, which later attempts append to."""

    def keep(self, part: Path, name: str, etag: str) -> None:
        """Store a finished, checked file."""

    def finish(self, files: Sequence[RemoteFile], by_client: Sequence[RemoteFile]) -> None:
        """Make `path` from all files. `by_client`: those that only the hub's client can download, which are missing."""

    def stale(self) -> tuple[str, ...]:
        """Folders of unfinished downloads of other commits."""


class HubCache:
    """The HF cache: files under blobs/ by checksum, and a snapshot folder of links to them."""

    def __init__(self, repository: str, revision: str, sha: str, token: str | None) -> None:
        self._repository, self._revision, self._token = repository, revision, token
        self._root = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
        self.path = self._root / "snapshots" / sha

    def places(self, name: str, etag: str) -> list[Path]:
        blob, link = self._root / "blobs" / etag, self.path / name
        found = [place for place in (blob, link) if os.path.lexists(place)]
        return found[:1] if len(found) == 2 and link.resolve() == blob.resolve() else found

    def discard(self, place: Path) -> None:
        if place.parent == self._root / "blobs":  # which may be a link into the store that all repositories share
            place.resolve().unlink(missing_ok=True)
        place.unlink(missing_ok=True)

    def part(self, name: str, etag: str) -> Path:
        return self._root / "blobs" / (etag + PART_SUFFIX)

    def keep(self, part: Path, name: str, etag: str) -> None:
        os.replace(part, part.with_name(etag))

    def stale(self) -> tuple[str, ...]:
        return ()  # `hf cache` manages them

    def finish(self, files: Sequence[RemoteFile], by_client: Sequence[RemoteFile]) -> None:
        # The client links the blobs, and downloads files that only it can.
        snapshot_download(
            self._repository,
            revision=self._revision,
            allow_patterns=[escape(file.name) for file in files],
            token=self._token,
            endpoint=constants.ENDPOINT,
        )
        for file in by_client:
            check_sum((self.path / file.name).resolve(), file.etag, name=file.name)


class PlainFolder:
    """A plain folder. Until it is complete it has a temporary name that contains the commit.

    A folder that was downloaded before is mended in place: only damaged and missing files are downloaded.
    """

    def __init__(self, dst: Path, repository: str, sha: str, token: str | None) -> None:
        self._repository, self._sha, self._token = repository, sha, token
        self.path = dst
        self._mark = f".download-{dst.name}-"
        self.staging = dst.absolute().parent / (self._mark + sha[:12])
        self.home = dst if is_downloaded(dst) else self.staging

    def require_same_commit(self, files: Sequence[RemoteFile]) -> None:
        """Raise CheckpointError if the folder has files of another repository or commit."""
        recorded = recorded_files(self.path)
        others = [f.name for f in files if f.name in recorded and recorded[f.name].etag != f.etag]
        if others:
            commits = sorted({recorded[name].commit for name in others})
            raise CheckpointError(
                f"{self.path}: was downloaded before, and these files are not those of {self._repository} at "
                f"{self._sha[:12]}:{list_offenders(others)}",
                hint="give another folder or, to check and mend this one, the commit that it was downloaded at",
                tries=[f"titan download {self._repository} {self.path} --revision {commits[0]}"],
            )

    def places(self, name: str, etag: str) -> list[Path]:
        return [self.home / name] if os.path.lexists(self.home / name) else []

    def discard(self, place: Path) -> None:
        if self.home == self.path and place.exists():  # a user may have edited it
            os.replace(place, place.with_name(place.name + REPLACED_SUFFIX))
        else:
            place.unlink(missing_ok=True)

    def part(self, name: str, etag: str) -> Path:
        return self.staging / (name + PART_SUFFIX)

    def keep(self, part: Path, name: str, etag: str) -> None:
        (self.home / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, self.home / name)

    def stale(self) -> tuple[str, ...]:
        found = self.staging.parent.glob(escape(self._mark) + "[0-9a-f]" * 12)
        return tuple(sorted(str(p) for p in found if p != self.staging))

    def finish(self, files: Sequence[RemoteFile], by_client: Sequence[RemoteFile]) -> None:
        for file in by_client:
            hf_hub_download(
                self._repository,
                file.name,
                revision=self._sha,
                local_dir=self.home,
                token=self._token,
                endpoint=constants.ENDPOINT,
            )
            check_sum(self.home / file.name, file.etag, name=file.name)
        for file in files:
            record_file(self.home, file.name, Recorded(self._sha, file.etag), time.time())
        if self.home == self.staging:
            commit(self.staging, self.path, marks=replaceable())
        else:
            shutil.rmtree(self.staging, ignore_errors=True)


def is_downloaded(folder: Path) -> bool:
    """Whether a folder was downloaded from the hub, by titan or `hf download --local-dir`, and may be mended."""
    return folder.is_dir() and not folder.is_symlink() and bool(recorded_files(folder))


def check_folder(dst: Path) -> None:
    """Raise CheckpointError unless `dst` may be written: it is absent, empty, or was downloaded before."""
    if not is_downloaded(dst):
        check_destination(dst, overwrite=False, marks=replaceable())
