"""Check at the start that all nodes see the same checkpoint folder, and not only at the first save."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist

from converters.common.errors import CheckpointError, list_offenders
from converters.store.base import is_present, read_bytes
from converters.store.location import Location, Place, locate
from converters.store.output import Output
from converters.store.outputs import run_outputs_at
from trainer.ranks.agree import on_each, on_first

# NFS clients keep attributes of folders for up to a minute, so that they may see a new file as late as that
PATIENCE_SECS = 60.0
_RETRY_SECS = 0.2
_TOKEN = "token"


def require_shared(folder: Place, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on all ranks, unless every rank reads what rank 0 writes to `folder`, and rank 0 finds
    what they write beside it. The folder must exist on rank 0. Nothing is left behind.
    """
    location = locate(folder)
    outputs, inside = run_outputs_at(location), location / _TOKEN
    identifier = on_first(group, lambda: outputs.prepare(inside))
    output = outputs.shared(inside, identifier, marker="")
    try:
        on_first(group, lambda: _create(output, _TOKEN))
        problems = on_each(group, lambda: _visit(output, group.rank()))
        visited = [rank for rank, problem in enumerate(problems) if not problem]
        for lost in on_first(group, lambda: _missing(output, visited)):
            problems[lost] = "what it writes there does not reach rank 0"
        what = f"{folder} is not one folder that all nodes can write to"
        _refuse(what, problems, location, group, tries=["--job.dump_folder SHARED_FOLDER"])
    finally:
        if group.rank() == 0:
            output.discard()


def require_seen(path: Place, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on all ranks, if rank 0 sees a checkpoint and another rank does not. Writes nothing."""
    location = locate(path)
    exists = partial(is_present, location)
    if on_first(group, exists):
        problems = on_each(group, lambda: "" if _comes_true(exists) else "does not see it")
        _refuse(f"{path} is not seen by all nodes", problems, location, group)


def _create(output: Output, name: str) -> None:
    with output.create(name):
        pass


def _visit(output: Output, rank: int) -> str:
    """Read rank 0's token and write a file beside it; what failed, "" if nothing did."""
    if not _comes_true(lambda: output.identity(_TOKEN) is not None):
        return "does not see what rank 0 writes there"
    try:
        read_bytes(output.store, _TOKEN)
        _create(output, str(rank))
    except OSError as error:
        return f"cannot read and write there: {error.strerror}"
    except CheckpointError as error:
        return f"cannot read and write there: {error.message}"
    return ""


def _missing(output: Output, ranks: Sequence[int]) -> list[int]:
    """Ranks whose files do not appear, within one time limit for all of them."""
    deadline = time.monotonic() + PATIENCE_SECS
    return [rank for rank in ranks if not _comes_true(lambda: output.identity(str(rank)) is not None, deadline)]  # noqa: B023


def _comes_true(is_seen: Callable[[], bool], deadline: float | None = None) -> bool:
    """Whether something is seen before `deadline`, by default PATIENCE_SECS from now."""
    deadline = deadline or time.monotonic() + PATIENCE_SECS
    while not is_seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(_RETRY_SECS)
    return True


def _refuse(
    what: str, problems: Sequence[str], location: Location, group: dist.ProcessGroup, *, tries: Sequence[str] = ()
) -> None:
    """Raise CheckpointError with the ranks that have a problem, by node."""
    if not any(problems):
        return
    places = on_each(group, lambda: (socket.gethostname(), location.absolute()))
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
