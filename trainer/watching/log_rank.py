"""LOG_RANK: the ranks whose log lines are shown."""

import os

from converters.errors import ConfigError


def shown_ranks(world_size: int) -> frozenset[int]:
    """Ranks whose log lines are shown: those of LOG_RANK, `0,1`, as in torchtitan's run_train.sh; else rank 0."""
    said = os.environ.get("LOG_RANK", "").strip() or "0"
    try:
        ranks = frozenset(map(int, said.split(",")))
    except ValueError:
        ranks = frozenset([-1])  # refused below
    if not ranks <= frozenset(range(world_size)):
        known = f"0 to {world_size - 1}" if world_size > 1 else "0"
        raise ConfigError(
            f"LOG_RANK = {said!r} names ranks whose log lines are shown; the ranks are {known}",
            tries=["LOG_RANK=0", "unset LOG_RANK"],
        )
    return ranks
