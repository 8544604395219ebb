"""Compose a pipeline rank's trace, with all microbatches in its full order, from the templates of a short one.

Each action is written with the template of its context. The result is checked: each block is freed at most once, after
its allocation, with the size that its template has, and it is kept if its template keeps it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from titan_tools.memory.expand.order import NO_MICROBATCH, Order
from titan_tools.memory.expand.spans import (
    ActionHistory,
    NotComposable,
    OtherSpan,
    Reference,
    RepeatedFrees,
    ShortCapture,
    SpanBlock,
    SpanKey,
    Template,
    Templates,
    of_microbatch,
    point_of,
)
from titan_tools.memory.trace.events import Block, StepPoint, Trace, TraceSegment


def compose(
    templates: Templates, captured: ShortCapture, order: Order, *, stages: Sequence[int], layers: Mapping[int, int]
) -> Trace:
    """The trace of a rank that holds `stages` and runs `order`; `layers`: captured layer's number → the rank's.

    Raises NotComposable.
    """
    player = _Player(captured, ActionHistory(dict.fromkeys(range(1, captured.num_steps + 1), order)), stages, layers)
    steps = list(zip(order.actions, order.contexts(), strict=True))
    for entry in templates.sequence:
        if not isinstance(entry, SpanKey):
            player.play(*entry)
            continue
        for action, context in steps:
            template = templates.of_context.get((*entry[:2], context))
            if template is None:
                raise NotComposable(f"{action} occurs in a context that was not captured: {context}")
            key = entry._replace(what=action)
            player.play(key, point_of(key, stages, captured.num_microbatches), template)
    return player.finish()


@dataclass(slots=True)
class _Ready:
    """A template prepared for a rank."""

    references: list[Reference]
    about: np.ndarray  # of each event: the number of the reference whose block it frees, or -1 where it allocates
    names: list[SpanBlock]  # of each event
    blocks: list[tuple[int, str, str, str, int]]  # bytes, stream, part, owner, number of the module
    modules: list[str]
    ends: list[int]  # of each module's events
    freed_bytes: list[int]
    kept: list[int]
    numbers: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)  # by the ids of the references' templates


@dataclass(slots=True)
class _Player:
    captured: ShortCapture
    history: ActionHistory
    stages: Sequence[int]
    layers: Mapping[int, int]
    trace: Trace = field(default_factory=Trace)
    spans: dict[SpanKey, tuple[int, Template]] = field(default_factory=dict)  # the number of the first block
    ready: dict[int, _Ready] = field(default_factory=dict)  # by the template's id
    renamed: dict[str, str] = field(default_factory=dict)
    events: list[np.ndarray] = field(default_factory=list)
    freed_bytes: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def play(self, key: SpanKey, point: StepPoint, template: Template) -> None:
        blocks, segments = self.trace.blocks, self.trace.segments
        base = len(blocks)
        self.spans[key] = base, template
        if template.events:
            if (ready := self.ready.get(id(template))) is None:
                ready = self.ready[id(template)] = self._ready(template)
            homes = [self._home(key, reference) for reference in ready.references]
            known = tuple(id(home) for _, home in homes)
            if (numbers := ready.numbers.get(known)) is None:
                numbers = ready.numbers[known] = _numbers(ready, template, [home for _, home in homes])
            is_free = ready.about >= 0
            bases = np.array([start for start, _ in homes] + [base])
            events = numbers + bases[ready.about]  # -1 is the last one, its own
            events[is_free] = ~events[is_free]
            self.events.append(events)
            self.freed_bytes += ready.freed_bytes
            self.kept += [base + number for number in ready.kept]
            if isinstance(key.what, OtherSpan) and key.what.part != NO_MICROBATCH:
                point = point._replace(stage=self.stages[key.what.part])
            points = [point._replace(module=module) for module in ready.modules]
            blocks += [Block(size, stream, part, points[at], owner) for size, stream, part, owner, at in ready.blocks]
            listed = events.tolist()
            start = 0
            for at, end in zip(points, ready.ends, strict=True):
                segments.append(TraceSegment(at, listed[start:end]))
                start = end
        if not isinstance(key.what, OtherSpan):
            self.history.add(key)

    def finish(self) -> Trace:
        """The trace, with segments at the same point merged, after the checks."""
        trace = self.trace
        events = np.concatenate(self.events)
        sizes = np.fromiter((block.num_bytes for block in trace.blocks), np.int64, len(trace.blocks))
        when = np.arange(len(events))
        made = np.full(len(trace.blocks), -1)
        made[events[events >= 0]] = when[events >= 0]
        freed = ~events[events < 0]
        if len(np.unique(freed)) != len(freed) or (made[freed] > when[events < 0]).any():
            raise NotComposable("a block is freed twice, or before it is allocated")
        if (sizes[freed] != self.freed_bytes).any():
            raise NotComposable("a freed block has another size than in the short trace")
        if not np.array_equal(np.setdiff1d(np.arange(len(sizes)), freed), self.kept):
            raise NotComposable("other blocks are kept than in the short trace")
        merged: list[TraceSegment] = []
        for segment in trace.segments:
            if merged and merged[-1].point == segment.point:
                merged[-1].events.extend(segment.events)
            else:
                merged.append(segment)
        return Trace(trace.blocks, merged)

    def _home(self, key: SpanKey, reference: Reference) -> tuple[int, Template]:
        home: SpanKey | None = reference.key
        if reference.how == "same":
            home = of_microbatch(reference.key, key.what.microbatch)
        elif reference.how != "key":
            home = self.history.find(reference)
        if home is None or home not in self.spans:
            raise NotComposable(f"{key} frees a block of {reference}, which does not exist")
        return self.spans[home]

    def _ready(self, template: Template) -> _Ready:
        references: dict[Reference, int] = {}
        about: list[int] = []
        names: list[SpanBlock] = []
        ends: list[int] = []
        blocks = []
        events = iter(template.events)
        for number, (_, count) in enumerate(template.modules):
            for event in islice(events, count):
                for reference, name in self._one_by_one(event) if isinstance(event, RepeatedFrees) else [event]:
                    names.append(name)
                    if reference is not None:
                        about.append(references.setdefault(reference, len(references)))
                        continue
                    about.append(-1)
                    owner = self._renamed(template.blocks[name][1])
                    blocks.append((name.num_bytes, name.stream, name.part, owner, number))
            ends.append(len(about))
        freed_bytes = [name.num_bytes for at, name in zip(about, names, strict=True) if at >= 0]
        modules = [self._renamed(module) for module, _ in template.modules]
        return _Ready(
            list(references), np.array(about), names, blocks, modules, ends, freed_bytes, sorted(template.kept)
        )

    def _one_by_one(self, several: RepeatedFrees) -> list[tuple[Reference, SpanBlock]]:
        microbatches = range(several.first, self.captured.num_microbatches - several.spare)
        return [
            (Reference("key", of_microbatch(reference.key, microbatch)), name)
            for microbatch in (microbatches if several.is_rising else reversed(microbatches))
            for reference, name in several.frees
        ]

    def _renamed(self, fqn: str) -> str:
        if fqn not in self.renamed:
            head, _, rest = fqn.partition(".")
            number, dot, tail = rest.partition(".")
            new = fqn if head != "layers" else f"{head}.{self.layers[int(number)]}{dot}{tail}"
            self.renamed[fqn] = new
        return self.renamed[fqn]


def _numbers(ready: _Ready, template: Template, homes: Sequence[Template]) -> np.ndarray:
    """The number of each event's block in its span; `homes` are the templates of the referenced spans."""
    found = []
    for at, name in zip(ready.about.tolist(), ready.names, strict=True):
        home = template if at < 0 else homes[at]
        if name not in home.blocks:
            raise NotComposable(f"a block is freed that does not exist: {name}")
        found.append(home.blocks[name][0])
    return np.array(found)
