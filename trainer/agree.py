"""Work whose outcome all ranks share: what one finds, all know; where one fails, all raise the same."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from converters.errors import CheckpointError, TitanError

T = TypeVar("T")


def on_each(group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank and give each all results; or raise, on all, the error of the lowest that fails."""
    outcome: tuple[T | None, Exception | None]
    try:
        outcome = work(), None
    except (TitanError, OSError) as error:
        outcome = None, error
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, outcome, group=group)
    for rank, (_, error) in enumerate(outcomes):
        if isinstance(error, OSError):
            raise CheckpointError(f"rank {rank}: {error}")
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def on_first(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 only, and give its result, or its error, to all."""
    return on_each(group, work if group.rank() == 0 else lambda: None)[0]
