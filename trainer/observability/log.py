"""Log lines: notes on stderr from rank 0, and which ranks' log lines are shown."""

import os
import sys

from converters.errors import ConfigError


def note(text: str) -> None:
    """Print a line on stderr, from rank 0 only."""
    import torch.distributed as dist  # here: `titan train` checks LOG_RANK without torch

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def shown_ranks(world_size: int) -> frozenset[int]:
    """The ranks whose log lines are shown: those of LOG_RANK (`0,1`, as in torchtitan's run_train.sh), else rank 0."""
    value = os.environ.get("LOG_RANK", "").strip() or "0"
    try:
        ranks = frozenset(map(int, value.split(",")))
    except ValueError:
        ranks = frozenset([-1])  # rejected below
    if not ranks <= frozenset(range(world_size)):
        known = f"0 to {world_size - 1}" if world_size > 1 else "0"
        raise ConfigError(
            f"LOG_RANK = {value!r} must list ranks whose log lines are shown; the ranks are {known}",
            tries=["LOG_RANK=0", "unset LOG_RANK"],
        )
    return ranks
