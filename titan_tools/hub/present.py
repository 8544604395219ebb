"""Compare files that are already downloaded with the hub's checksums."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from converters.common.errors import CheckpointError, list_offenders
from converters.containers.safetensors import read_weight_map
from converters.conversion.records import Progress
from converters.store.folder import FolderStore
from converters.store.hub_checksums import Recorded, has_content, is_computable, recorded_files
from titan_tools.hub.targets import DownloadTarget, RemoteFile

CHECKING = "comparing with the hub's checksums"


@dataclass(frozen=True, slots=True)
class Present:
    """The files of a download with what is here of each, those that must be downloaded, and damaged ones."""

    files: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]
    damaged: Mapping[str, Sequence[Path]]  # file → places of damaged copies of it


def compare(files: Sequence[RemoteFile], target: DownloadTarget, *, workers: int, progress: Progress) -> Present:
    """Read what earlier downloads have left of `files`, and compare it with size and checksum."""
    places = {file.name: target.places(file.name, file.etag) for file in files}
    num_bytes = sum(_size(path) for paths in places.values() for path in paths)
    with progress(num_bytes, CHECKING) as advance, ThreadPoolExecutor(workers) as pool:
        jobs = {path: pool.submit(_is_whole, path, file, advance) for file in files for path in places[file.name]}
        whole = {path for path, job in jobs.items() if job.result()}
    bad = {name: [path for path in paths if path not in whole] for name, paths in places.items()}
    counted, missing = [], []
    for file in files:
        if whole.isdisjoint(places[file.name]):
            begun = _size(target.part(file.name, file.etag))
            counted.append(replace(file, num_bytes_here=min(begun, file.num_bytes)))
            missing.append(counted[-1])
        else:
            counted.append(replace(file, num_bytes_here=file.num_bytes))
    return Present(tuple(counted), tuple(missing), {name: paths for name, paths in bad.items() if paths})


def _is_whole(place: Path, file: RemoteFile, advance: Callable[[int], None]) -> bool:
    if not place.is_file() or place.stat().st_size != file.num_bytes:
        return False
    return not is_computable(file.etag) or has_content(place, file.etag, advance=advance)


@dataclass(frozen=True, slots=True)
class EarlierDownload:
    """The files of an earlier download; both collections are empty if there was none."""

    folder: Path
    recorded: Mapping[str, Recorded]  # its files with their checksums
    unchecked: frozenset[str] = frozenset()  # files of the cache without one: copies of blobs, ETags of some mirrors

    @property
    def commit(self) -> str:
        return next(iter(self.recorded.values())).commit if self.recorded else self.folder.name


def find_present(repository: str, dst: Path | None, revision: str) -> EarlierDownload:
    """The earlier download to `dst` or, if that is None, to the cache."""
    if dst is not None:
        return EarlierDownload(dst, recorded_files(dst) if dst.is_dir() else {})
    root = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    branch = root / "refs" / revision
    commit = branch.read_text(errors="replace").strip() if branch.is_file() else revision
    folder = root / "snapshots" / PurePosixPath(commit).name
    recorded = recorded_files(folder) if folder.is_dir() else {}
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return EarlierDownload(folder, recorded, frozenset(present - recorded.keys()))


def require_whole(
    earlier: EarlierDownload, names: Sequence[str], *, command: str, workers: int, progress: Progress
) -> tuple[RemoteFile, ...]:
    """The files of an earlier download, compared with their recorded checksums, without the hub.

    Raises CheckpointError with those that are damaged or missing: the recorded ones, and those that an index names.
    Whether others are missing only the hub knows.
    """
    folder, recorded = earlier.folder, {name: earlier.recorded[name] for name in names if name in earlier.recorded}
    num_bytes = sum(_size(folder / name) for name in recorded)
    with progress(num_bytes, CHECKING) as advance, ThreadPoolExecutor(workers) as pool:
        jobs = {n: pool.submit(has_content, folder / n, r.etag, advance=advance) for n, r in recorded.items()}
        bad = [f"{name}: {_fault(folder / name)}" for name, job in jobs.items() if not job.result()]
    if not bad:
        store, indexes = FolderStore(folder), [name for name in names if name.endswith(".index.json")]
        listed = {str(file) for index in indexes for file in read_weight_map(store, index).values()}
        bad = [f"{name}: missing, and the index names it" for name in sorted(listed) if not (folder / name).is_file()]
    if bad:
        raise CheckpointError(
            f"{folder}: the download is damaged or incomplete:{list_offenders(bad)}",
            hint="HF_HUB_OFFLINE is set, so nothing was downloaded; with a network, this command downloads these files "
            "again",
            tries=[f"HF_HUB_OFFLINE=0 {command}"],
        )
    sizes = {name: _size(folder / name) for name in names}
    etags = {name: record.etag for name, record in recorded.items()}
    return tuple(RemoteFile(name, size, etags.get(name, ""), size) for name, size in sizes.items())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _fault(path: Path) -> str:
    if path.is_file():
        return "does not match the hub's checksum"
    return "a link to nowhere" if path.is_symlink() else "missing"
