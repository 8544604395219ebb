"""The Hugging Face cache: the snapshot of a repository's folder, and the allowed targets of its links.

models--org--name/refs/main            the commit of a branch
models--org--name/snapshots/COMMIT/x   a link to ../../blobs/SUM
models--org--name/blobs/SUM            a file, or a link into the store that all repositories share:
blobs/AB/ABCD…                         next to a marker file
"""

import os
import re
from pathlib import Path

from converters.common.errors import CheckpointError

_SNAPSHOTS, _BLOBS, _REFS = "snapshots", "blobs", "refs"
_SHARED_MARKER = ".huggingface-shared-blobs"
_SHARED_SUM = re.compile("[0-9a-f]{64}")


def snapshot_of(path: Path) -> Path:
    """`path` or, for a repository's folder in the cache, the snapshot of its branch `main`.

    Raises CheckpointError if there are several and no `main` among them.
    """
    snapshots = path / _SNAPSHOTS
    if not ((path / _BLOBS).is_dir() and snapshots.is_dir()):
        return path
    folders = sorted(p for p in snapshots.iterdir() if p.is_dir())
    main = path / _REFS / "main"
    if main.is_file():
        commit = main.read_text(errors="replace").strip()
        if any(p.name == commit for p in folders):
            return snapshots / commit
    if len(folders) == 1:
        return folders[0]
    what = f"{len(folders)} snapshots, none of which is its branch main" if folders else "no snapshot"
    raise CheckpointError(
        f"{path}: a repository of the Hugging Face cache with {what}",
        hint="name one of them" if folders else "the download was interrupted; the same command resumes it",
        tries=[str(p) for p in folders[:8]],
    )


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint's files: its snapshot or, of a file, the folder that it is in."""
    return snapshot_of(path) if path.is_dir() else path.parent


def repository_of(folder: Path) -> Path | None:
    """The repository's folder in the cache whose snapshot contains `folder`, resolved; None for other folders."""
    folder = Path(os.path.realpath(folder))
    repository = next((p.parent.parent for p in (folder, *folder.parents) if p.parent.name == _SNAPSHOTS), None)
    return repository if repository and repository.name.startswith("models--") else None


def blob_of(path: Path, repository: Path) -> Path | None:
    """The blob of a repository that a file of its snapshot links to, whether it exists or not; None for other files.

    It is the link's own target: the file of a blob may be in the store that all repositories share, under another name.
    """
    if not path.is_symlink():
        return None
    target = Path(os.path.normpath(os.path.realpath(path.parent) + os.sep + os.readlink(path)))
    return target if target.parent == repository / _BLOBS else None


def is_blob_of(target: Path, folder: Path) -> bool:
    """Whether `target` is a blob of the repository whose snapshot contains `folder`. Both are resolved paths."""
    repository = next((p.parent for p in (folder, *folder.parents) if p.parent.name == _SNAPSHOTS), None)
    if repository is None:
        return False
    repository = repository.parent
    if target.parent == repository / _BLOBS:
        return True
    store = repository.parent / _BLOBS
    return (
        bool(_SHARED_SUM.fullmatch(target.name))
        and target.parent == store / target.name[:2]
        and (store / _SHARED_MARKER).is_file()
    )
