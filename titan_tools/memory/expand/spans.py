"""How the spans of a pipeline rank's trace are named, and what a template of one holds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_tools.memory.expand.order import END, NO_MICROBATCH, Order, RankAction
from titan_tools.memory.trace.events import StepPoint
from titan_tools.memory.trace.tracking import NO_STAGE


class NotComposable(Exception):
    """A trace whose actions do not repeat as they would have to."""


class OtherSpan(NamedTuple):
    """What is no action of a schedule: `name` and how many of the same came before; buffers have a microbatch."""

    name: str
    number: int
    part: int = NO_MICROBATCH
    microbatch: int = NO_MICROBATCH


class SpanKey(NamedTuple):
    """A span of events; a step has one batch, or several to accumulate."""

    step: int
    batch: int
    what: RankAction | OtherSpan


class Reference(NamedTuple):
    """Whose block is freed: `key`'s; that of the `same` microbatch; the `first` or `last` of a kind, or some `back`.

    Where the microbatch is not meant, `key` has microbatch 0.
    """

    how: str
    key: SpanKey
    kind: tuple = ()
    back: int = 0


class SpanBlock(NamedTuple):
    """A block among those of its span: the `number`-th that looks like this. Numbers alone would not do: the first
    action of a kind makes some that later ones do not."""

    num_bytes: int
    stream: str
    part: str
    module: str
    number: int


class RepeatedFrees(NamedTuple):
    """Frees, each a (Reference to the same microbatch, Name), that come for each microbatch in turn.

    From microbatch `first` to `spare` before the last, or the other way round.
    """

    frees: tuple[tuple[Reference, SpanBlock], ...]
    is_rising: bool
    first: int
    spare: int


@dataclass(slots=True)
class Template:
    """Events of a span: (None, name) allocates a block; (reference, name) frees that block of another span; or Several.

    `blocks`: each block's number and owner by name, in the order of allocation. `modules`: which run, and how many of
    `events` each.
    """

    events: list[Any] = field(default_factory=list)
    blocks: dict[SpanBlock, tuple[int, str]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()  # numbers of the blocks that are never freed
    modules: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShortCapture:
    """How a short trace was made."""

    stages: tuple[int, ...]  # that the rank holds
    short: Order  # in the last step
    shorter: Order  # in the steps before
    num_steps: int
    num_microbatches: int  # of the full order, in one batch
    num_batches: int  # that a step accumulates

    def order(self, step: int) -> Order:
        return self.short if step == self.num_steps else self.shorter

    def orders(self) -> list[Order]:
        """Of each batch."""
        return [self.order(step) for step in range(1, self.num_steps + 1) for _ in range(self.num_batches)]


@dataclass(slots=True)
class Templates:
    """All that a rank's traces are played from. `sequence`: what comes outside of orders, and where an order comes."""

    sequence: list[tuple[SpanKey, StepPoint, Template] | SpanKey]
    of_context: dict[tuple, Template]  # (step, batch, context)


class ActionHistory:
    """Which actions of each kind have come. What FSDP gathers has kinds of its own: by what a stage did before."""

    def __init__(self, orders: Mapping[int, Order]):
        """`orders`: of each step."""
        self._before = {
            (step, action): context[-1]
            for step, order in orders.items()
            for action, context in zip(order.actions, order.contexts(), strict=True)
        }
        self._come: dict[tuple, list[SpanKey]] = defaultdict(list)

    def add(self, key: SpanKey) -> None:
        for is_gathered in (False, True):
            self._come[self._kind(key, is_gathered)].append(key)

    def reference(self, key: SpanKey, name: SpanBlock, *, prefer_first: bool = False) -> Reference:
        """An action by its number among those of its kind that have come until now.

        `prefer_first`: where only one has come, which is both the first and the last.
        """
        kind = self._kind(key, name.part == "all_gather")
        come = self._come[kind]
        back = len(come) - come.index(key)
        anonymous = of_microbatch(key, 0)
        if back == len(come) and (back > 1 or prefer_first):
            return Reference("first", anonymous, kind)
        if back == 1:
            return Reference("last", anonymous, kind)
        return Reference("back", anonymous, kind, back)

    def find(self, reference: Reference) -> SpanKey | None:
        come = self._come[reference.kind]
        number = {"first": 0, "last": -1}.get(reference.how, -reference.back)
        return come[number] if -len(come) <= number < len(come) else None

    def _kind(self, key: SpanKey, is_gathered: bool) -> tuple:
        return key.step, key.batch, *key.what.kind, self._before[key.step, key.what] if is_gathered else None


def of_microbatch(key: SpanKey, microbatch: int) -> SpanKey:
    """The same of another microbatch; as it is, where it belongs to none."""
    if key.what.microbatch == NO_MICROBATCH:
        return key
    return key._replace(what=key.what._replace(microbatch=microbatch))


def point_of(key: SpanKey, stages: Sequence[int], num_microbatches: int) -> StepPoint:
    """Where an action stands, as pipeline_places.py tells it."""
    phase, part, microbatch = key.what
    if key.what == END:
        return StepPoint(key.step, "forward", NO_STAGE, NO_MICROBATCH)
    if microbatch != NO_MICROBATCH:
        microbatch += key.batch * num_microbatches
    return StepPoint(key.step, phase, stages[part], microbatch)
