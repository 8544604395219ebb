"""A pipeline schedule that runs a short order in the place of its own, in a batch of its true size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining.schedules import get_schedule_class

from titan_tools.memory.trace.pipeline.order import Order


@contextmanager
def shortened(schedule: str, orders: Sequence[Order]) -> Iterator[None]:
    """Within, torch's schedule splits its batch and makes its buffers for all microbatches, and runs the first few.

    `orders`: what it runs in each batch, one after the other.

    The losses of those that are left out are the last one's.
    """
    schedule_class = get_schedule_class(schedule)
    own = schedule_class._step_microbatches
    coming = iter(orders)

    def step_microbatches(
        self: Any, arg_mbs: list, kwarg_mbs: list, target_mbs: list | None, losses: list | None, *rest: Any, **more: Any
    ) -> None:
        short = next(coming)
        count, true_count = short.num_microbatches, self._n_microbatches
        settings: dict[str, Any] = {"_n_microbatches": count}
        if short.planned:
            settings["pipeline_order_with_comms"] = {self.rank: short.planned}
        elif short.warmup:
            settings["_num_stages"] = self._stage.stage_index + short.warmup
        initialize = "_initialize_stages" if short.planned else "_initialize_stage"
        own_initialize = getattr(self, initialize)

        def initialized(*args: Any, **kwargs: Any) -> None:
            with patch.object(self, "_n_microbatches", true_count):
                own_initialize(*args, **kwargs)

        def cut(microbatches: list | None) -> list | None:
            return microbatches and microbatches[:count]

        with patch.multiple(self, **settings, **{initialize: initialized}):
            own(self, cut(arg_mbs), cut(kwarg_mbs), cut(target_mbs), losses, *rest, **more)
        if losses:
            losses += losses[-1:] * (true_count - count)

    with patch.object(schedule_class, "_step_microbatches", step_microbatches):
        yield
