"""Download a model from the Hugging Face hub: select files, resume, check every byte, then commit."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Event
from typing import Any

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import HF_CONFIG, HF_GENERATION_CONFIG, META_PARAMS, TIKTOKEN_MODEL
from converters.conversion.records import Progress, no_progress
from converters.store.hub_checksums import is_computable
from converters.store.location import locate
from converters.store.outputs import require_space
from converters.tokenizers.assets import CARRIED, CHAT_TEMPLATES
from titan_tools.hub.errors import hub_errors
from titan_tools.hub.fetch import check_sum, fetch
from titan_tools.hub.present import EarlierDownload, compare, find_present, require_whole
from titan_tools.hub.targets import DownloadTarget, HubCache, PlainFolder, RemoteFile, check_folder

WORKERS = 4
# Larger files are served only to the hub's own client, which restarts such a file after an interruption.
MAX_HTTP_BYTES = constants.MAX_HTTP_DOWNLOAD_SIZE
_SMALL = ("*.json", "*.model", "*.jinja", "*.tiktoken", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*", "USE_POLICY*")
_WEIGHTS = (("*.safetensors",), ("*.bin",), ("*.pth", "*.pt"))  # the first kind that the repository has
_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
_REPEATED = "consolidated*.safetensors"  # in some repositories a second copy of the weights
_ORIGINAL = "original/"  # Meta's original files, in addition to the same weights as safetensors
# By the names of torchtitan's scripts/download_hf_assets.py
ASSETS: Mapping[str, tuple[str, ...]] = {
    "tokenizer": (*CARRIED, f"{CHAT_TEMPLATES}/*.jinja", _ORIGINAL + TIKTOKEN_MODEL),
    "config": (HF_CONFIG, HF_GENERATION_CONFIG, META_PARAMS),
    "index": _INDEXES,
    "safetensors": ("*.safetensors", _INDEXES[0]),
}


@dataclass(frozen=True, slots=True)
class FileSelection:
    """The files to download: `include` and `assets` replace the default selection, `exclude` is applied last."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    original: bool = False
    assets: Sequence[str] = ()  # keys of ASSETS

    @property
    def is_default(self) -> bool:
        """Whether weights are selected if the repository has any."""
        return not self.include and not self.assets and not self.exclude

    def select(self, names: Sequence[str]) -> list[str]:
        """The selected files of a repository."""
        chosen = select_default(names) if not self.include and not self.assets else []
        for kind in self.assets:
            chosen += [n for n in names if _is_asset(n, kind, names) and n not in chosen]
        chosen += [n for n in names if _matches(n, self.include) and n not in chosen]
        if self.original:
            chosen += [n for n in names if n.startswith(_ORIGINAL) and n not in chosen]
        return [n for n in chosen if not _matches(n, self.exclude)]


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
    damaged: tuple[str, ...] = ()  # files of an earlier download that did not match the hub's checksum
    unchecked: tuple[str, ...] = ()  # files whose ETag is no checksum: only their sizes were compared
    stale: tuple[str, ...] = ()  # unfinished downloads of other commits to the same destination

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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

    Resumes an interrupted download. What an earlier one has left is compared with the hub's checksums, and what is
    damaged is downloaded again. Offline, it is compared with the checksums that the download recorded.

    Raises CheckpointError for problems of access, network, disk and names and, offline, for damaged files.
    """
    started = time.monotonic()
    disable_progress_bars()  # of the client
    selection = selection or FileSelection()
    if constants.HF_HUB_OFFLINE:
        earlier = find_present(repository, dst, revision)
        if earlier.recorded or earlier.unchecked:
            return _check_earlier(earlier, repository, dst, revision, selection, workers, progress)
    if dst is not None:
        check_folder(dst)
    with hub_errors(repository, revision, token=token):
        info = HfApi(endpoint=constants.ENDPOINT, token=token).model_info(repository, revision=revision)
        if info.sha is None:
            raise CheckpointError(f"{repository}: the hub returned no commit", hint="check HF_ENDPOINT")
        names = _selected(repository, [f.rfilename for f in info.siblings or ()], selection)
        urls = {n: hf_hub_url(repository, n, revision=info.sha, endpoint=constants.ENDPOINT) for n in names}
        with ThreadPoolExecutor(workers) as pool:
            listed = tuple(pool.map(lambda name: _look_up(name, urls[name], token), names))
        target: DownloadTarget = HubCache(repository, revision, info.sha, token)
        if dst is not None:
            target = folder_target = PlainFolder(dst, repository, info.sha, token)
            folder_target.require_same_commit(listed)
        present = compare(listed, target, workers=workers, progress=progress)
        num_missing = sum(f.num_bytes - f.num_bytes_here for f in present.missing)
        if not dry_run:
            require_space(locate(target.path), num_missing)
            for path in (path for places in present.damaged.values() for path in places):
                target.discard(path)
            by_http = [f for f in present.missing if f.num_bytes <= MAX_HTTP_BYTES]
            with progress(num_missing, "downloading") as advance:
                _fetch_all(by_http, urls, target, token, workers, advance)
            target.finish(present.files, [f for f in present.missing if f.num_bytes > MAX_HTTP_BYTES])
    return DownloadReport(
        repository,
        revision,
        info.sha,
        str(target.path),
        present.files,
        num_bytes=sum(f.num_bytes for f in present.files),
        num_fetched_bytes=num_missing,
        secs=time.monotonic() - started,
        damaged=tuple(present.damaged),
        unchecked=tuple(f.name for f in present.files if not is_computable(f.etag)),
        stale=target.stale(),
    )


def _check_earlier(
    earlier: EarlierDownload,
    repository: str,
    dst: Path | None,
    revision: str,
    selection: FileSelection,
    workers: int,
    progress: Progress,
) -> DownloadReport:
    """Compare the files of an earlier download with the checksums that it recorded, without a network."""
    started = time.monotonic()
    names = _selected(repository, sorted([*earlier.recorded, *earlier.unchecked]), selection)
    command = shlex.join(["titan", "download", repository, *([str(dst)] if dst else [])])
    command += "" if revision == "main" else f" --revision {revision}"
    if selection.is_default and not any(_matches(n, kind) for n in names for kind in _WEIGHTS):
        raise CheckpointError(
            f"{earlier.folder}: has no weights:{list_offenders(names)}",
            hint="HF_HUB_OFFLINE is set, so nothing was downloaded; with a network, this command completes it",
            tries=[f"HF_HUB_OFFLINE=0 {command}"],
        )
    files = require_whole(earlier, names, command=command, workers=workers, progress=progress)
    return DownloadReport(
        repository,
        revision,
        earlier.commit,
        str(earlier.folder),
        files,
        num_bytes=sum(file.num_bytes for file in files),
        num_fetched_bytes=0,
        secs=time.monotonic() - started,
        unchecked=tuple(name for name in names if name in earlier.unchecked),
    )


def select_default(names: Sequence[str]) -> list[str]:
    """Small files and one set of weights. Subfolders hold other forms of the same weights (original/, onnx/)."""
    top = [n for n in names if "/" not in n]
    kind = next((k for k in _WEIGHTS if any(_matches(n, k) for n in top)), ())
    unwanted = [index for index in _INDEXES if not any(index.startswith(weights) for weights in kind)]
    if any(_matches(n, kind) and not fnmatch(n, _REPEATED) for n in top):
        unwanted.append(_REPEATED)
    return [n for n in top if _matches(n, (*_SMALL, *kind)) and not _matches(n, unwanted)]


def _is_asset(name: str, kind: str, names: Sequence[str]) -> bool:
    if kind in ("index", "safetensors") and name not in select_default(names):  # a second copy of the weights
        return False
    return _matches(name, ASSETS[kind])


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
        content = list_offenders(names) if names else " nothing"
        raise CheckpointError(
            f"{repository}: no file is selected; the repository has{content}",
            hint="--include PATTERN selects other files",
        )
    return selected


def _look_up(name: str, url: str, token: str | None) -> RemoteFile:
    remote = get_hf_file_metadata(url, token=token, endpoint=constants.ENDPOINT)
    if remote.etag is None or remote.size is None:
        raise CheckpointError(f"{url}: the hub returned no size or no ETag", hint="check HF_ENDPOINT")
    return RemoteFile(name, remote.size, remote.etag)


def _fetch_all(
    wanted: Sequence[RemoteFile],
    urls: dict[str, str],
    target: DownloadTarget,
    token: str | None,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    """Download `wanted`, several at a time; the first failure stops the others."""
    headers, stop = build_hf_headers(token=token), Event()

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
