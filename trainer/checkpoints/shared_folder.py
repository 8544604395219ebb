"""Check at the start that all nodes see the same checkpoint folder, and not only at the first save."""

import shutil
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import TEMPORARY_PREFIX
from trainer.ranks.agree import on_each, on_first

# NFS clients keep attributes of folders for up to a minute, so that they may see a new file as late as that
PATIENCE_SECS = 60.0
_RETRY_SECS = 0.2
_TOKEN = "token"


def require_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on all ranks, unless every rank reads what rank 0 writes to `folder`, and rank 0 finds
    what they write beside it. The folder must exist on rank 0. Nothing is left behind.
    """
    name = on_first(group, lambda: f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    visited_folder = folder / name
    try:
        on_first(group, lambda: _make_token(visited_folder))
        problems = on_each(group, lambda: _visit(visited_folder, group.rank()))
        visited = [rank for rank, problem in enumerate(problems) if not problem]
        for lost in on_first(group, lambda: _missing(visited_folder, visited)):
            problems[lost] = "what it writes there does not reach rank 0"
        what = f"{folder} is not one folder that all nodes can write to"
        _refuse(what, problems, folder, group, tries=["--job.dump_folder SHARED_FOLDER"])
    finally:
        if group.rank() == 0:
            shutil.rmtree(visited_folder, ignore_errors=True)


def require_seen(path: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on all ranks, if rank 0 sees a checkpoint and another rank does not. Writes nothing."""
    if on_first(group, path.exists):
        problems = on_each(group, lambda: "" if _finds(path) else "does not see it")
        _refuse(f"{path} is not seen by all nodes", problems, path, group)


def _make_token(place: Path) -> None:
    place.mkdir()
    (place / _TOKEN).touch()


def _visit(place: Path, rank: int) -> str:
    """Read rank 0's token and write a file beside it; what failed, "" if nothing did."""
    if not _finds(place / _TOKEN):
        return "does not see what rank 0 writes there"
    try:
        (place / _TOKEN).read_bytes()
        (place / str(rank)).touch()
    except OSError as error:
        return f"cannot read and write there: {error.strerror}"
    return ""


def _missing(place: Path, ranks: Sequence[int]) -> list[int]:
    """Ranks whose files do not appear, within one time limit for all of them."""
    deadline = time.monotonic() + PATIENCE_SECS
    return [rank for rank in ranks if not _finds(place / str(rank), deadline)]


def _finds(path: Path, deadline: float | None = None) -> bool:
    """Whether the path can be seen before `deadline`, by default PATIENCE_SECS from now."""
    deadline = deadline or time.monotonic() + PATIENCE_SECS
    while not _is_seen(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(_RETRY_SECS)
    return True


def _is_seen(path: Path) -> bool:
    """False also if it cannot be asked: NFS answers ESTALE for a folder that was just made."""
    try:
        return path.exists()
    except OSError:
        return False


def _refuse(
    what: str, problems: Sequence[str], path: Path, group: dist.ProcessGroup, *, tries: Sequence[str] = ()
) -> None:
    """Raise CheckpointError with the ranks that have a problem, by node."""
    if not any(problems):
        return
    places = on_each(group, lambda: (socket.gethostname(), path.absolute()))
    ranks = defaultdict(list)
    for rank, (problem, place) in enumerate(zip(problems, places, strict=True)):
        if problem:
            ranks[place, problem].append(str(rank))
    lines = [
        f"{node} (rank{'s' if len(there) > 1 else ''} {', '.join(there)}): {found}: {problem}"
        for ((node, found), problem), there in ranks.items()
    ]
    raise CheckpointError(
        f"{what}:{list_offenders(lines)}",
        hint=f"rank 0 is on {places[0][0]}; every rank reads and writes its part of a checkpoint: use a file system "
        "that all nodes mount at the same path",
        tries=tries,
    )
