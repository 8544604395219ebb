"""The ranks of one model as each of them sees them: its place, and what they do together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from converters.errors import TitanError
from converters.manifest import in_threads
from titan_tools.infer.ranks.machine import own_machine
from trainer.agree import on_each, on_first

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among `tp`; `talk` is their group for what the first alone knows, such as what a person types.

    `neighbours` is the group of those on its own machine, which see the same files.
    """

    tp: int
    rank: int
    device: torch.device
    talk: Any = None
    neighbours: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def done_by_first(self, work: Callable[[], T]) -> T:
        """What `work` gives the first rank, which alone does it, on all ranks; where it fails, all raise its error.

        They wait for it as long as a person thinks.
        """
        return work() if self.tp == 1 else on_first(self.talk, work)

    def done_by_each(self, work: Callable[..., T], *given: Any, **named: Any) -> T:
        """What `work` gives this rank, once all have done it; where it fails on some, all raise the lowest's error."""
        if self.tp == 1:
            return work(*given, **named)
        own: list[T] = []

        def do() -> None:
            try:
                own.append(work(*given, **named))
            except TitanError as error:
                if self.neighbours.size() < self.tp:
                    error.hint = f"{error.hint}; seen by rank {self.rank} on {own_machine()[0]}".removeprefix("; ")
                raise

        on_each(self.talk, do)
        return own[0]

    def shared_out(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """What `works` give, each done by one of the ranks of this machine, a few at a time."""
        if self.tp == 1:
            return in_threads(works)
        num, own = self.neighbours.size(), self.neighbours.rank()
        parts = on_each(self.neighbours, lambda: in_threads(works[own::num]))
        return [parts[i % num][i // num] for i in range(len(works))]
