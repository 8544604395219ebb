"""Download a model: list, choose, fetch what is missing, check every byte, and only then show it under its name."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from converters.commit import check_destination, commit, require_space
from converters.errors import CheckpointError, list_offenders
from converters.execute import Progress, no_progress
from titan_tools.hub.choose import Choice
from titan_tools.hub.errors import told_plainly
from titan_tools.hub.fetch import check_sum, fetch

WORKERS = 4
PART_SUFFIX = ".incomplete"
# The hub serves larger files to its own client only, which starts such a file anew after a cut.
MOST_BYTES_BY_HTTP = constants.MAX_HTTP_DOWNLOAD_SIZE


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at one commit."""

    name: str
    num_bytes: int
    etag: str  # its SHA-256 where it is large (LFS), else git's SHA-1 of it
    num_bytes_here: int  # all of them: it is whole and checked


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """What was fetched, or, after a dry run, what would be."""

    repository: str
    revision: str
    commit: str
    path: str  # what every command takes as a checkpoint
    files: tuple[RemoteFile, ...]
    num_bytes: int
    num_fetched_bytes: int  # without what lay here before
    secs: float
    stale: tuple[str, ...] = ()  # folders of unfinished downloads to the same place, of other commits

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Place(Protocol):
    """Where a download goes: the HF cache, or a plain folder."""

    path: Path  # what there will be

    def whole(self, name: str, etag: str = "") -> Path | None:
        """The file, if an earlier try has finished it. Some places know only by its ETag."""

    def part(self, name: str, etag: str) -> Path:
        """Where the bytes of an unfinished file gather, also over several tries."""

    def keep(self, part: Path, name: str, etag: str) -> None:
        """Take a finished, checked file."""

    def finish(self, names: Sequence[str]) -> None:
        """Make `path` of all files."""

    def stale(self) -> tuple[str, ...]:
        """What lies there of downloads of other commits, and nobody will finish."""


class Cache:
    """The HF cache: files under blobs/ by checksum, and a snapshot folder of links to them."""

    def __init__(self, repository: str, revision: str, sha: str, token: str | None):
        self._repository, self._revision, self._token = repository, revision, token
        self._root = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
        self.path = self._root / "snapshots" / sha

    def whole(self, name: str, etag: str = "") -> Path | None:
        places = [self.path / name, *([self._root / "blobs" / etag] if etag else [])]
        return next((place for place in places if place.is_file()), None)

    def part(self, name: str, etag: str) -> Path:
        return self._root / "blobs" / (etag + PART_SUFFIX)

    def keep(self, part: Path, name: str, etag: str) -> None:
        os.replace(part, part.with_name(etag))

    def stale(self) -> tuple[str, ...]:
        return ()  # `hf cache` looks after it

    def finish(self, names: Sequence[str]) -> None:
        # The blobs are there; the client links them, and fetches what only it can.
        snapshot_download(
            self._repository,
            revision=self._revision,
            allow_patterns=[escape(name) for name in names],
            token=self._token,
            endpoint=constants.ENDPOINT,
        )


class Folder:
    """A plain folder. Until all is there it has another name, which belongs to this commit."""

    def __init__(self, dst: Path, repository: str, sha: str, token: str | None):
        self._repository, self._sha, self._token = repository, sha, token
        self.path = dst
        self._mark = f".download-{dst.name}-"
        self.staging = dst.absolute().parent / (self._mark + sha[:12])

    def whole(self, name: str, etag: str = "") -> Path | None:
        return self.staging / name if (self.staging / name).is_file() else None

    def part(self, name: str, etag: str) -> Path:
        return self.staging / (name + PART_SUFFIX)

    def keep(self, part: Path, name: str, etag: str) -> None:
        os.replace(part, self.staging / name)

    def stale(self) -> tuple[str, ...]:
        found = self.staging.parent.glob(escape(self._mark) + "[0-9a-f]" * 12)
        return tuple(sorted(str(p) for p in found if p != self.staging))

    def finish(self, names: Sequence[str]) -> None:
        for name in names:
            if self.whole(name) is None:
                hf_hub_download(
                    self._repository,
                    name,
                    revision=self._sha,
                    local_dir=self.staging,
                    token=self._token,
                    endpoint=constants.ENDPOINT,
                )
        shutil.rmtree(self.staging / ".cache", ignore_errors=True)  # the client's notes
        commit(self.staging, self.path)


def download(
    repository: str,
    dst: Path | None = None,
    *,
    revision: str = "main",
    choice: Choice | None = None,
    token: str | None = None,
    workers: int = WORKERS,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> DownloadReport:
    """Fetch a repository's checkpoint into the HF cache or, with `dst`, a folder that appears when all is there.

    Goes on with what an earlier try has left. Raises CheckpointError in words about access, network, disk and names.
    """
    started = time.monotonic()
    disable_progress_bars()  # the client's own
    if dst is not None:
        check_destination(dst, overwrite=False)
    with told_plainly(repository, revision, token=token):
        found = HfApi(endpoint=constants.ENDPOINT, token=token).model_info(repository, revision=revision)
        place: Place = Cache(repository, revision, found.sha, token)
        if dst is not None:
            place = Folder(dst, repository, found.sha, token)
        names = _chosen(repository, [f.rfilename for f in found.siblings or ()], choice or Choice())
        urls = {n: hf_hub_url(repository, n, revision=found.sha, endpoint=constants.ENDPOINT) for n in names}
        with ThreadPoolExecutor(workers) as pool:
            files = tuple(pool.map(lambda name: _look_up(name, urls[name], place, token), names))
        missing = sum(f.num_bytes - f.num_bytes_here for f in files)
        if not dry_run:
            require_space(place.path, missing)
            with progress(missing, "downloading") as advance:
                _fetch_all(files, urls, place, token, workers, advance)
            place.finish(names)
    return DownloadReport(
        repository,
        revision,
        found.sha,
        str(place.path),
        files,
        num_bytes=sum(f.num_bytes for f in files),
        num_fetched_bytes=missing,
        secs=time.monotonic() - started,
        stale=place.stale(),
    )


def _chosen(repository: str, names: Sequence[str], choice: Choice) -> list[str]:
    chosen = choice.of(names)
    outside = [n for n in chosen if n.startswith("/") or ".." in n.split("/") or not n.isprintable() or "\\" in n]
    if outside:
        raise CheckpointError(f"{repository}: names files outside of itself:" + list_offenders(outside))
    if not chosen:
        held = list_offenders(names) if names else " nothing"
        raise CheckpointError(
            f"{repository}: no file of it is wanted; it holds{held}",
            hint="--include PATTERN takes others",
        )
    return chosen


def _look_up(name: str, url: str, place: Place, token: str | None) -> RemoteFile:
    if (whole := place.whole(name)) is not None:
        size = whole.stat().st_size
        return RemoteFile(name, size, "", size)
    remote = get_hf_file_metadata(url, token=token, endpoint=constants.ENDPOINT)
    if remote.etag is None or remote.size is None:
        raise CheckpointError(f"{url}: the hub names no size or no ETag", hint="is HF_ENDPOINT right?")
    begun = place.whole(name, remote.etag) or place.part(name, remote.etag)
    here = begun.stat().st_size if begun.is_file() else 0
    return RemoteFile(name, remote.size, remote.etag, min(here, remote.size))


def _fetch_all(
    files: Sequence[RemoteFile],
    urls: dict[str, str],
    place: Place,
    token: str | None,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    """All files, several at a time; the first failure stops the others."""
    headers, stop = build_hf_headers(token=token), Event()
    wanted = [f for f in files if place.whole(f.name, f.etag) is None and f.num_bytes <= MOST_BYTES_BY_HTTP]

    def fetch_one(file: RemoteFile) -> None:
        part = place.part(file.name, file.etag)
        fetch(urls[file.name], part, num_bytes=file.num_bytes, headers=headers, advance=advance, stop=stop)
        check_sum(part, file.etag, name=file.name)
        place.keep(part, file.name, file.etag)

    pool = ThreadPoolExecutor(workers)
    try:
        for done in as_completed([pool.submit(fetch_one, file) for file in wanted]):
            done.result()
    finally:  # an error, or somebody's Ctrl-C
        stop.set()
        pool.shutdown(cancel_futures=True)
