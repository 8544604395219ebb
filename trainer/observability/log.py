"""Log lines: notes on stderr from rank 0, and which ranks' log lines are shown."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from converters.common.errors import ConfigError
from trainer.observability.status_line import erase

SLOW_SECS = 1.0


def note(text: str) -> None:
    """Print a line on stderr, from rank 0 only."""
    if _is_first():
        erase()
        print(text, file=sys.stderr, flush=True)


@contextmanager
def phase(text: str) -> Iterator[None]:
    """Print what takes so long, from rank 0 only, if the context takes longer than a second."""
    timer = threading.Timer(SLOW_SECS, note, [f"{text} …"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_first() -> bool:
    """Whether this is rank 0, or no rank. Until ranks have joined, the launcher's RANK counts."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and getattr(dist, "is_initialized", bool)():  # it may be half imported, by another thread
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def shown_ranks(world_size: int) -> frozenset[int]:
    """The ranks whose log lines are shown: those of LOG_RANK (`0,1`, as in torchtitan's run_train.sh), else rank 0."""
    value = os.environ.get("LOG_RANK", "").strip() or "0"
    try:
        ranks = frozenset(map(int, value.split(",")))
    except ValueError:
        ranks = frozenset([-1])  # rejected below
    if not ranks <= frozenset(range(world_size)):
        all_ranks = f"0 to {world_size - 1}" if world_size > 1 else "0"
        raise ConfigError(
            f"LOG_RANK = {value!r} must list ranks whose log lines are shown; the ranks are {all_ranks}",
            tries=["LOG_RANK=0", "unset LOG_RANK"],
        )
    return ranks
