"""The order of every pipeline rank's actions in a step, and a short order with the same kinds of actions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.pipelining.stage import _RecvInfo

from converters.layout.stages import ranks_of_stages
from titan_tools.memory.trace.tracking import PHASES
from trainer.parallel.stages import V_SCHEDULES, StageSplit

NO_MICROBATCH = -1
Context = tuple[Any, ...]  # see Order.contexts
_TRANSFERS = tuple(PHASES[name] for name in PHASES if name.startswith(("RECV", "WAIT")))
# Backwards since the last forward up to which a loop frees what it received before it receives more
_STEADY = {"backward": 0, PHASES["RECV_B"]: 1}
_FEWEST_MICROBATCHES = 2  # the first one, and one for all others
_MOST_MICROBATCHES = 6


class RankAction(NamedTuple):
    """An action of a rank, as its points identify it. A send belongs to the forward or backward before it."""

    phase: str  # one of trace/tracking.py's PHASES; end: all microbatches are done
    part: int  # which of the rank's stages, from 0
    microbatch: int  # NO_MICROBATCH for an action on the stage as a whole

    @property
    def kind(self) -> tuple[str, int, bool]:
        return self.phase, self.part, self.microbatch == NO_MICROBATCH


END = RankAction("end", 0, NO_MICROBATCH)


@dataclass(frozen=True, slots=True)
class Order:
    """A rank's actions in a step, and the settings with which torch's schedule runs them."""

    actions: tuple[RankAction, ...]
    num_microbatches: int
    reshards: bool  # whether FSDP reshards a layer after its forward
    planned: tuple[Any, ...] = ()  # torch's own actions, for a schedule that runs a list of them
    warmup: int = 0  # 1F1B: forwards before the first backward

    def contexts(self) -> list[Context]:
        """What decides the events of each action: in one context they are the same, relative to earlier actions.

        The first of a kind allocates what later ones add to; a loop's local variables keep the newest forward's output,
        and without a forward in between the gradient received for a backward, until the next one is received; and if
        FSDP reshards after forward, it gathers again or not depending on its stage's last action.
        """
        seen: Counter[tuple[Any, ...]] = Counter()
        last_of_part: dict[int, str] = {}
        newest: dict[int, int] = {}
        num_backwards = 0  # since the last forward
        found = []
        for action in self.actions:
            phase, part, microbatch = action
            kept_by_loop = not self.planned and phase == "backward" and newest.get(part) == microbatch
            is_steady = num_backwards <= _STEADY.get(phase, num_backwards)
            is_late = not (self.planned or is_steady) and allocates_on_receipt()
            is_computed = phase not in _TRANSFERS
            before = last_of_part.get(part, "") if self.reshards and is_computed else ""
            found.append((action.kind, min(seen[action.kind], 1), kept_by_loop, is_late, before))
            seen[action.kind] += 1
            if is_computed:
                last_of_part[part] = phase
            if phase == "forward":
                newest[part] = microbatch
                num_backwards = 0
            num_backwards += phase == "backward"
        return found


def orders_of_ranks(
    schedule: str, split: StageSplit, pp: int, num_microbatches: int, *, reshards: bool
) -> dict[int, Order]:
    """What each pipeline rank does in a step, by torch's own schedules."""
    ranks = range(pp)
    planned = _planned_actions(schedule, pp=pp, num_stages=split.num_stages, num_microbatches=num_microbatches)
    if planned is None:
        return {rank: _of_loop(schedule, rank, split.num_stages, num_microbatches, reshards) for rank in ranks}
    return {rank: _of_plan(planned[rank], split.stages_of(rank), num_microbatches, reshards) for rank in ranks}


def allocates_on_receipt() -> bool:
    """Whether a stage allocates a buffer when it receives, and frees what was sent: from torch 2.15 on.

    Before, it keeps a buffer of each microbatch for all steps, and what it sends until its backward.
    """
    return hasattr(_RecvInfo, "allocate_buffer")


def shortest(orders: Sequence[Order], schedule: str) -> tuple[int, Order] | None:
    """The shortest order with every context that occurs in any of these, and the index of its source among them.

    `orders` are of ranks whose stages are of the same kinds. None if no short one has all contexts.
    """
    wanted = set().union(*(order.contexts() for order in orders))
    count = orders[0].num_microbatches
    for size in range(min(count, _FEWEST_MICROBATCHES), min(count, _MOST_MICROBATCHES) + 1):
        for number, order in enumerate(orders):
            for short in _shortened(order, size, schedule):
                if wanted <= set(short.contexts()):
                    return number, short
    return None


def of_one_microbatch(order: Order, schedule: str) -> Order:
    """The same with the first microbatch only."""
    return next(iter(_shortened(order, 1, schedule)))


def _of_loop(schedule: str, stage: int, num_stages: int, num_microbatches: int, reshards: bool) -> Order:
    """The order of a schedule of one stage per rank, for which torch has a loop instead of a plan.

    GPipe: all forwards, then all backwards. 1F1B: as many forwards as there are stages from this one on, then a
    backward before each further forward. It waits for a send before the next one, GPipe for all before a backward.
    """
    actions: list[RankAction] = []

    def add(name: str, microbatch: int) -> None:
        actions.append(RankAction(PHASES[name], 0, microbatch))

    def forward(microbatch: int) -> None:
        add("RECV_F", microbatch)
        add("F", microbatch)

    is_gpipe = schedule == "GPipe"
    warmup = min(num_microbatches, num_stages - stage)
    num_first = num_microbatches if is_gpipe else warmup
    for microbatch in range(num_first):
        forward(microbatch)
        if microbatch and not is_gpipe:
            add("WAIT_SEND_F", microbatch - 1)
    if is_gpipe:
        for microbatch in range(num_microbatches):
            add("WAIT_SEND_F", microbatch)
    for microbatch in range(num_microbatches):
        add("RECV_B", microbatch)
        if not is_gpipe and (sent := num_first + microbatch - 1) < num_microbatches:
            add("WAIT_SEND_F", sent)
        add("B", microbatch)
        if num_first + microbatch < num_microbatches:
            forward(num_first + microbatch)
    actions += [END, RankAction("reduce", 0, NO_MICROBATCH)]
    return Order(tuple(actions), num_microbatches, reshards, warmup=warmup)


@cache
def _planned_actions(schedule: str, *, pp: int, num_stages: int, num_microbatches: int) -> dict[int, list[Any]] | None:
    """By rank, torch's own plan for a schedule of several stages per rank; None for a schedule of one stage.

    Cached: torch simulates all ranks to find the order of sends, and the plan of one job is needed many times.
    """
    schedule_class = get_schedule_class(schedule)
    if not issubclass(schedule_class, PipelineScheduleMulti):
        return None
    ranks = ranks_of_stages(num_stages, pp, v_shaped=schedule in V_SCHEDULES)
    stages = [
        SimpleNamespace(group_size=pp, group_rank=0, num_stages=num_stages, stage_index=stage, submod=None)
        for stage in range(num_stages)
        if ranks[stage] == 0
    ]
    planned: dict[int, list[Any]] = schedule_class(stages, n_microbatches=num_microbatches).pipeline_order_with_comms
    return planned


def _of_plan(planned: Sequence[Any], stages: Sequence[int], num_microbatches: int, reshards: bool) -> Order:
    part_of = {stage: part for part, stage in enumerate(stages)}
    actions = []
    for action in planned:
        name = action.computation_type.value
        if name in PHASES and not name.startswith("SEND"):
            microbatch = NO_MICROBATCH if action.microbatch_index is None else action.microbatch_index
            actions.append(RankAction(PHASES[name], part_of[action.stage_index], microbatch))
    return Order((*actions, END), num_microbatches, reshards, planned=tuple(planned))


def _shortened(order: Order, size: int, schedule: str) -> Iterable[Order]:
    """Orders of `size` microbatches that torch can run instead of this one."""
    if not order.planned:
        for warmup in range(1, min(size, order.warmup) + 1):
            yield _of_loop(schedule, 0, warmup, size, order.reshards)
        return
    count = order.num_microbatches
    ends = sorted({0, 1, 2, count // 2, count - 3, count - 2, count - 1} & set(range(count)))
    stages = list(dict.fromkeys(action.stage_index for action in sorted(order.planned, key=lambda a: a.stage_index)))
    for kept in combinations(ends, size):
        number = {microbatch: i for i, microbatch in enumerate(kept)} | {None: None}
        yield _of_plan(
            [
                action._replace(microbatch_index=number[action.microbatch_index])
                for action in order.planned
                if action.microbatch_index in number
            ],
            stages,
            size,
            order.reshards,
        )


@contextmanager
def run_short_order(schedule: str, orders: Sequence[Order]) -> Iterator[None]:
    """Make torch's schedule split its batch and allocate its buffers for all microbatches, but run only the first few.

    `orders`: what it runs in each batch, in turn. Microbatches that do not run get the last one's loss.
    """
    schedule_class = get_schedule_class(schedule)
    run_all = schedule_class._step_microbatches
    remaining = iter(orders)

    def step_microbatches(
        self: Any,
        arg_mbs: list[Any],
        kwarg_mbs: list[Any],
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        *rest: Any,
        **more: Any,
    ) -> None:
        short = next(remaining)
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

        def cut(microbatches: list[Any] | None) -> list[Any] | None:
            return microbatches and microbatches[:count]

        settings[initialize] = initialized
        with ExitStack() as patches:
            for name, value in settings.items():
                patches.enter_context(patch.object(self, name, value))
            run_all(self, cut(arg_mbs), cut(kwarg_mbs), cut(target_mbs), losses, *rest, **more)
        if losses:
            losses += losses[-1:] * (true_count - count)

    with patch.object(schedule_class, "_step_microbatches", step_microbatches):
        yield
