"""The spans of a pipeline rank's trace: their keys, references between them, and templates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_tools.memory.expand.order import END, NO_MICROBATCH, Order, RankAction
from titan_tools.memory.trace.events import StepPoint
from titan_tools.memory.trace.tracking import NO_STAGE


class NotComposable(Exception):
    """The actions of a trace do not repeat."""


class OtherSpan(NamedTuple):
    """A span that is not an action of a schedule: its name, and how many of the same came before."""

    name: str
    number: int
    part: int = NO_MICROBATCH
    microbatch: int = NO_MICROBATCH  # of a receive buffer


class SpanKey(NamedTuple):
    """The identity of a span of events; a step has one batch, or several that it accumulates."""

    step: int
    batch: int
    what: RankAction | OtherSpan


class Reference(NamedTuple):
    """The span whose block is freed.

    `how`: "key": that of `key`; "same": of the same microbatch; "first" or "last" of a kind; or `back` before the last.
    Except for "key", `key` has microbatch 0.
    """

    how: str
    key: SpanKey
    kind: tuple[Any, ...] = ()
    back: int = 0


class SpanBlock(NamedTuple):
    """A block of a span: the `number`-th with these properties.

    A number alone is not enough: the first action of a kind makes blocks that later ones do not.
    """

    num_bytes: int
    stream: str
    part: str
    module: str
    number: int


class RepeatedFrees(NamedTuple):
    """Frees, each a (Reference to the same microbatch, SpanBlock), repeated for each microbatch.

    From microbatch `first` to `spare` before the last, rising or falling.
    """

    frees: tuple[tuple[Reference, SpanBlock], ...]
    is_rising: bool
    first: int
    spare: int


@dataclass(slots=True)
class Template:
    """The events of a span: (None, name) allocates a block; (reference, name) frees a block; or RepeatedFrees.

    `blocks`: each block's number and owner by name, in the order of allocation. `modules`: the modules that run, each
    with its number of events.
    """

    events: list[Any] = field(default_factory=list)
    blocks: dict[SpanBlock, tuple[int, str]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()  # numbers of the blocks that are never freed
    modules: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShortCapture:
    """How a short trace was captured."""

    stages: tuple[int, ...]  # that the rank holds
    short: Order  # in the last step
    shorter: Order  # in the steps before
    num_steps: int
    num_microbatches: int  # of the full order, in one batch
    num_batches: int  # that a step accumulates

    def order(self, step: int) -> Order:
        return self.short if step == self.num_steps else self.shorter

    def orders(self) -> list[Order]:
        """The order of each batch."""
        return [self.order(step) for step in range(1, self.num_steps + 1) for _ in range(self.num_batches)]


@dataclass(slots=True)
class Templates:
    """The source of a rank's traces. `sequence`: the spans outside of orders, and a key where an order starts."""

    sequence: list[tuple[SpanKey, StepPoint, Template] | SpanKey]
    of_context: dict[tuple[Any, ...], Template]  # (step, batch, context)


class ActionHistory:
    """The actions of each kind so far. For what FSDP gathers, a kind includes the stage's last action."""

    def __init__(self, orders: Mapping[int, Order]):
        """`orders`: of each step."""
        self._before = {
            (step, action): context[-1]
            for step, order in orders.items()
            for action, context in zip(order.actions, order.contexts(), strict=True)
        }
        self._so_far: dict[tuple[Any, ...], list[SpanKey]] = defaultdict(list)

    def add(self, key: SpanKey) -> None:
        for is_gathered in (False, True):
            self._so_far[self._kind(key, is_gathered)].append(key)

    def reference(self, key: SpanKey, name: SpanBlock, *, prefer_first: bool = False) -> Reference:
        """An action by its number among those of its kind so far.

        `prefer_first`: if there is only one, which is both the first and the last.
        """
        kind = self._kind(key, name.part == "all_gather")
        found = self._so_far[kind]
        back = len(found) - found.index(key)
        anonymous = of_microbatch(key, 0)
        if back == len(found) and (back > 1 or prefer_first):
            return Reference("first", anonymous, kind)
        if back == 1:
            return Reference("last", anonymous, kind)
        return Reference("back", anonymous, kind, back)

    def find(self, reference: Reference) -> SpanKey | None:
        found = self._so_far[reference.kind]
        number = {"first": 0, "last": -1}.get(reference.how, -reference.back)
        return found[number] if -len(found) <= number < len(found) else None

    def _kind(self, key: SpanKey, is_gathered: bool) -> tuple[Any, ...]:
        assert isinstance(key.what, RankAction)
        return key.step, key.batch, *key.what.kind, self._before[key.step, key.what] if is_gathered else None


def of_microbatch(key: SpanKey, microbatch: int) -> SpanKey:
    """The same key for another microbatch; unchanged if it has none."""
    if key.what.microbatch == NO_MICROBATCH:
        return key
    return key._replace(what=key.what._replace(microbatch=microbatch))


def point_of(key: SpanKey, stages: Sequence[int], num_microbatches: int) -> StepPoint:
    """The point of an action, as trace/tracking.py sets it."""
    assert isinstance(key.what, RankAction)
    phase, part, microbatch = key.what
    if key.what == END:
        return StepPoint(key.step, "forward", NO_STAGE, NO_MICROBATCH)
    if microbatch != NO_MICROBATCH:
        microbatch += key.batch * num_microbatches
    return StepPoint(key.step, phase, stages[part], microbatch)
