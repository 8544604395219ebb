"""Work whose outcome all ranks share: every rank gets the results, or raises the same error."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from converters.common.errors import CheckpointError, TitanError

T = TypeVar("T")


def on_each(group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all results; or raise, on all ranks, the error of the lowest that failed."""
    outcome: tuple[T | None, Exception | None]
    try:
        outcome = work(), None
    except (TitanError, OSError) as error:
        outcome = None, error
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, outcome, group=group)
    for rank, (_, failure) in enumerate(outcomes):
        if isinstance(failure, OSError):
            raise CheckpointError(f"rank {rank}: {failure}")
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]


def on_first(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only; all ranks return its result or raise its error."""
    result: list[Any] = on_each(group, work if group.rank() == 0 else lambda: None)
    return cast("T", result[0])
