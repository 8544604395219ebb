"""Download a model from the Hugging Face hub: select files, resume, check every byte, then commit."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from converters.commit import check_destination, commit, require_space
from converters.errors import CheckpointError, list_offenders
from converters.execute import Progress, no_progress
from titan_tools.hub.errors import hub_errors
from titan_tools.hub.fetch import check_sum, fetch

WORKERS = 4
PART_SUFFIX = ".incomplete"
# Larger files are served only to the hub's own client, which restarts such a file after an interruption.
MAX_HTTP_BYTES = constants.MAX_HTTP_DOWNLOAD_SIZE
_SMALL = ("*.json", "*.model", "*.jinja", "*.tiktoken", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*", "USE_POLICY*")
_WEIGHTS = (("*.safetensors",), ("*.bin",), ("*.pth", "*.pt"))  # the first kind that the repository has
_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
_REPEATED = "consolidated*.safetensors"  # in some repositories a second copy of the weights
_ORIGINAL = "original/"  # Meta's original files, in addition to the same weights as safetensors


@dataclass(frozen=True, slots=True)
class FileSelection:
    """Which files to download: `include` replaces the default selection, `exclude` is applied last."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    original: bool = False

    def select(self, names: Sequence[str]) -> list[str]:
        """The selected files of a repository."""
        chosen = [n for n in names if _matches(n, self.include)] if self.include else select_default(names)
        if self.original:
            chosen += [n for n in names if n.startswith(_ORIGINAL) and n not in chosen]
        return [n for n in chosen if not _matches(n, self.exclude)]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at one commit."""

    name: str
    num_bytes: int
    etag: str  # SHA-256 of a large file (LFS), else git's SHA-1
    num_bytes_here: int  # already downloaded; equal to num_bytes: complete and checked


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """The downloaded files, or those that a dry run would download."""

    repository: str
    revision: str
    commit: str
    path: str  # the checkpoint folder
    files: tuple[RemoteFile, ...]
    num_bytes: int
    num_fetched_bytes: int  # without the part that was downloaded before
    secs: float
    stale: tuple[str, ...] = ()  # unfinished downloads of other commits to the same destination

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DownloadTarget(Protocol):
    """Where a download is stored: the HF cache, or a plain folder."""

    path: Path  # the finished checkpoint folder

    def whole(self, name: str, etag: str = "") -> Path | None:
        """The file, if an earlier attempt has finished it. The cache needs the ETag to find it."""

    def part(self, name: str, etag: str) -> Path:
        """The partial file, which later attempts append to."""

    def keep(self, part: Path, name: str, etag: str) -> None:
        """Store a finished, checked file."""

    def finish(self, names: Sequence[str]) -> None:
        """Make `path` from all files."""

    def stale(self) -> tuple[str, ...]:
        """Folders of unfinished downloads of other commits."""


class HubCache:
    """The HF cache: files under blobs/ by checksum, and a snapshot folder of links to them."""

    def __init__(self, repository: str, revision: str, sha: str, token: str | None) -> None:
        self._repository, self._revision, self._token = repository, revision, token
        self._root = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
        self.path = self._root / "snapshots" / sha

    def whole(self, name: str, etag: str = "") -> Path | None:
        places = [self.path / name, *([self._root / "blobs" / etag] if etag else [])]
        return next((path for path in places if path.is_file()), None)

    def part(self, name: str, etag: str) -> Path:
        return self._root / "blobs" / (etag + PART_SUFFIX)

    def keep(self, part: Path, name: str, etag: str) -> None:
        os.replace(part, part.with_name(etag))

    def stale(self) -> tuple[str, ...]:
        return ()  # `hf cache` manages them

    def finish(self, names: Sequence[str]) -> None:
        # The client links the blobs, and downloads files that only it can.
        snapshot_download(
            self._repository,
            revision=self._revision,
            allow_patterns=[escape(name) for name in names],
            token=self._token,
            endpoint=constants.ENDPOINT,
        )


class PlainFolder:
    """A plain folder. Until it is complete it has a temporary name that contains the commit."""

    def __init__(self, dst: Path, repository: str, sha: str, token: str | None) -> None:
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
        shutil.rmtree(self.staging / ".cache", ignore_errors=True)  # metadata of the client
        commit(self.staging, self.path)


def download(
    repository: str,
    dst: Path | None = None,
    *,
    revision: str = "main",
    selection: FileSelection | None = None,
    token: str | None = None,
    workers: int = WORKERS,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> DownloadReport:
    """Download a checkpoint into the HF cache or, with `dst`, into a folder that is created when it is complete.

    Resumes an interrupted download. Raises CheckpointError for problems of access, network, disk and names.
    """
    started = time.monotonic()
    disable_progress_bars()  # of the client
    if dst is not None:
        check_destination(dst, overwrite=False)
    with hub_errors(repository, revision, token=token):
        found = HfApi(endpoint=constants.ENDPOINT, token=token).model_info(repository, revision=revision)
        if found.sha is None:
            raise CheckpointError(f"{repository}: the hub returned no commit", hint="check HF_ENDPOINT")
        target: DownloadTarget = HubCache(repository, revision, found.sha, token)
        if dst is not None:
            target = PlainFolder(dst, repository, found.sha, token)
        names = _selected(repository, [f.rfilename for f in found.siblings or ()], selection or FileSelection())
        urls = {n: hf_hub_url(repository, n, revision=found.sha, endpoint=constants.ENDPOINT) for n in names}
        with ThreadPoolExecutor(workers) as pool:
            files = tuple(pool.map(lambda name: _look_up(name, urls[name], target, token), names))
        missing = sum(f.num_bytes - f.num_bytes_here for f in files)
        if not dry_run:
            require_space(target.path, missing)
            with progress(missing, "downloading") as advance:
                _fetch_all(files, urls, target, token, workers, advance)
            target.finish(names)
    return DownloadReport(
        repository,
        revision,
        found.sha,
        str(target.path),
        files,
        num_bytes=sum(f.num_bytes for f in files),
        num_fetched_bytes=missing,
        secs=time.monotonic() - started,
        stale=target.stale(),
    )


def select_default(names: Sequence[str]) -> list[str]:
    """Small files and one set of weights. Subfolders hold other forms of the same weights (original/, onnx/)."""
    top = [n for n in names if "/" not in n]
    kind = next((k for k in _WEIGHTS if any(_matches(n, k) for n in top)), ())
    unwanted = [index for index in _INDEXES if not any(index.startswith(weights) for weights in kind)]
    if any(_matches(n, kind) and not fnmatch(n, _REPEATED) for n in top):
        unwanted.append(_REPEATED)
    return [n for n in top if _matches(n, (*_SMALL, *kind)) and not _matches(n, unwanted)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _selected(repository: str, names: Sequence[str], selection: FileSelection) -> list[str]:
    selected = selection.select(names)
    outside = [n for n in selected if n.startswith("/") or ".." in n.split("/") or not n.isprintable() or "\\" in n]
    if outside:
        raise CheckpointError(
            f"{repository}: file names that point outside of the repository:" + list_offenders(outside)
        )
    if not selected:
        held = list_offenders(names) if names else " nothing"
        raise CheckpointError(
            f"{repository}: no file is selected; the repository has{held}",
            hint="--include PATTERN selects other files",
        )
    return selected


def _look_up(name: str, url: str, target: DownloadTarget, token: str | None) -> RemoteFile:
    if (whole := target.whole(name)) is not None:
        size = whole.stat().st_size
        return RemoteFile(name, size, "", size)
    remote = get_hf_file_metadata(url, token=token, endpoint=constants.ENDPOINT)
    if remote.etag is None or remote.size is None:
        raise CheckpointError(f"{url}: the hub returned no size or no ETag", hint="check HF_ENDPOINT")
    begun = target.whole(name, remote.etag) or target.part(name, remote.etag)
    here = begun.stat().st_size if begun.is_file() else 0
    return RemoteFile(name, remote.size, remote.etag, min(here, remote.size))


def _fetch_all(
    files: Sequence[RemoteFile],
    urls: dict[str, str],
    target: DownloadTarget,
    token: str | None,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    """Download all files, several at a time; the first failure stops the others."""
    headers, stop = build_hf_headers(token=token), Event()
    wanted = [f for f in files if target.whole(f.name, f.etag) is None and f.num_bytes <= MAX_HTTP_BYTES]

    def fetch_one(file: RemoteFile) -> None:
        part = target.part(file.name, file.etag)
        fetch(urls[file.name], part, num_bytes=file.num_bytes, headers=headers, advance=advance, stop=stop)
        check_sum(part, file.etag, name=file.name)
        target.keep(part, file.name, file.etag)

    pool = ThreadPoolExecutor(workers)
    try:
        for done in as_completed([pool.submit(fetch_one, file) for file in wanted]):
            done.result()
    finally:  # an error, or Ctrl-C
        stop.set()
        pool.shutdown(cancel_futures=True)
