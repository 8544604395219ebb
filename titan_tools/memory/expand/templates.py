"""Cut a pipeline rank's trace at its actions (forward, backward, reduction) into templates.

A template refers to what it frees relative to itself, so that it applies to other microbatches: to blocks of its own
microbatch, or of the first or last action of a kind.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from titan_tools.memory.expand.order import END, NO_MICROBATCH, RankAction
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
from titan_tools.memory.trace.events import StepPoint, Trace, TraceSegment

_AFTER = ("clip", "optimizer", "zero_grad", "validation")
_LONGEST_PERIOD = 8  # frees that repeat for each microbatch


def read_templates(trace: Trace, captured: ShortCapture) -> Templates:
    """The templates of a trace in a short order. Raises NotComposable."""
    homes: dict[int, tuple[SpanKey, SpanBlock]] = {}
    freed = {~event for _, event in trace.events() if event < 0}
    orders = {step: captured.order(step) for step in range(1, captured.num_steps + 1)}
    history = ActionHistory(orders)
    context_of = {
        (step, action): context
        for step, order in orders.items()
        for action, context in zip(order.actions, order.contexts(), strict=True)
    }
    templates = Templates([], {})
    ordered: set[tuple[int, int]] = set()
    buffers_kept: dict[SpanKey, frozenset[int]] = {}
    for key, segments in _named(trace, captured):
        template, kept_blocks = Template(), set()
        alike: Counter[tuple[Any, ...]] = Counter()
        for segment in segments:
            module = segment.point.module
            template.modules.append((module, len(segment.events)))
            for event in segment.events:
                if event >= 0:
                    block = trace.blocks[event]
                    look = block.num_bytes, block.stream, block.part, module
                    homes[event] = key, SpanBlock(*look, alike[look])
                    alike[look] += 1
                    if event not in freed:
                        kept_blocks.add(len(template.blocks))
                    template.events.append((None, homes[event][1]))
                    template.blocks[homes[event][1]] = len(template.blocks), block.owner
                else:
                    home, name = homes[~event]
                    template.events.append((_reference(key, home, history, name), name))
        template.kept = frozenset(kept_blocks)
        if key.what.microbatch == NO_MICROBATCH:
            template = _combine_repeated_frees(template, captured, history)
        if isinstance(key.what, OtherSpan):
            if key.what.microbatch >= captured.short.num_microbatches:  # a buffer that no action used
                template.kept = buffers_kept[of_microbatch(key, 0)]
            elif key.what.microbatch == 0:
                buffers_kept[key] = template.kept
            templates.sequence.append((key, segments[0].point, template))
            continue
        if key[:2] not in ordered:
            ordered.add(key[:2])
            templates.sequence.append(key)
        history.add(key)
        first_template = templates.of_context.setdefault((*key[:2], context_of[key.step, key.what]), template)
        if first_template != template:
            raise NotComposable(f"{key} differs from an earlier action in the same context")
    _share_with_earlier_steps(templates, captured)
    return templates


def _share_with_earlier_steps(templates: Templates, captured: ShortCapture) -> None:
    """Use the last step's templates for the steps before it, if their own templates are the same."""
    last = captured.num_steps
    if captured.shorter == captured.short:
        return
    for (step, batch, context), template in list(templates.of_context.items()):
        for earlier in range(1, last) if step == last else ():
            moved = _moved(template, earlier - last)
            known = templates.of_context.get((earlier, batch, context), moved)
            (_, _, belongs_to_none), *_ = context
            # What belongs to no microbatch may free blocks of all of them, which one microbatch does not show
            if known != moved and not belongs_to_none:
                raise NotComposable(f"{context} differs in step {earlier}")
            templates.of_context[earlier, batch, context] = moved


def _moved(template: Template, steps: int) -> Template:
    """The template `steps` later."""

    def moved(reference: Reference) -> Reference:
        if not reference.key.step:
            return reference
        kind = reference.kind and (reference.kind[0] + steps, *reference.kind[1:])
        return reference._replace(key=reference.key._replace(step=reference.key.step + steps), kind=kind)

    events = [
        event._replace(frees=tuple((moved(reference), name) for reference, name in event.frees))
        if isinstance(event, RepeatedFrees)
        else (event[0] and moved(event[0]), event[1])
        for event in template.events
    ]
    return Template(events, template.blocks, template.kept, template.modules)


def _cut(trace: Trace) -> list[tuple[StepPoint, list[TraceSegment]]]:
    """Runs of segments at points that differ only in the module; each with its point without a module."""
    runs = groupby(trace.segments, lambda segment: segment.point._replace(module=""))
    return [(point, list(segments)) for point, segments in runs]


def _named(trace: Trace, captured: ShortCapture) -> Iterator[tuple[SpanKey, list[TraceSegment]]]:
    """Each span with its key, in time order; actions without events included."""
    spans = _cut(trace)
    at = 0
    steps = sorted({point.step for point, _ in spans})
    for step in steps:
        counts: Counter[tuple[Any, ...]] = Counter()

        def outside(
            batch: int, name: str, *more: int, step: int = step, counts: dict[tuple[Any, ...], int] = counts
        ) -> SpanKey:
            number = counts[batch, name, more]
            counts[batch, name, more] += 1
            return SpanKey(step, batch, OtherSpan(name, number, *more))

        for batch in range(captured.num_batches if step else 0):
            before = _point(SpanKey(step, batch, END), captured)
            if batch == 0 and spans[at][0] == before._replace(stage=0):
                yield outside(batch, "start"), spans[at][1]
                at += 1
            while at < len(spans) and (spans[at][0] == before or spans[at][0][:2] == (step, "build")):
                point, segments = spans[at]
                if point.phase == "build":
                    key = outside(0, "build", captured.stages.index(point.stage), point.microbatch)
                else:
                    key = outside(batch, "before")
                yield key, segments
                at += 1
            for action in captured.order(step).actions:
                key = SpanKey(step, batch, action)
                if at < len(spans) and spans[at][0] == _point(key, captured):
                    yield key, spans[at][1]
                    at += 1
                else:
                    yield key, []
        while at < len(spans) and (point := spans[at][0]).step == step and (step == 0 or point.phase in _AFTER):
            yield outside(captured.num_batches, "after"), spans[at][1]
            at += 1
    if at < len(spans):
        raise NotComposable(f"{spans[at][0]} does not follow the order")


def _point(key: SpanKey, captured: ShortCapture) -> StepPoint:
    return point_of(key, captured.stages, captured.num_microbatches)


def _reference(key: SpanKey, home: SpanKey, history: ActionHistory, name: SpanBlock) -> Reference:
    """How `key` finds `home`, whose block it frees. A key without a microbatch refers to it directly, for now."""
    microbatch = key.what.microbatch
    if home == key:
        return Reference("key" if microbatch == NO_MICROBATCH else "same", of_microbatch(home, 0))
    if microbatch == NO_MICROBATCH:
        return Reference("key", home)
    if home.what.microbatch == microbatch:
        return Reference("same", of_microbatch(home, 0))
    if isinstance(home.what, OtherSpan):
        return Reference("key", home)
    return history.reference(home, name)


def _combine_repeated_frees(template: Template, captured: ShortCapture, history: ActionHistory) -> Template:
    """Combine frees that repeat for all microbatches; refer to the others by their number in their kind."""
    old = template.events
    events: list[Any] = []
    modules: list[tuple[str, int]] = []
    at = 0
    for module, count in template.modules:
        end, before = at + count, len(events)
        while at < end:
            found, taken = _repeated_frees(old[at:end], captured)
            if found:
                events.append(found)
                at += taken
                continue
            reference, name = old[at]
            if reference and _is_per_microbatch(reference.key):
                reference = history.reference(
                    reference.key, name, prefer_first=True
                )  # gradients belong to the first one
                if reference.how == "back":
                    raise NotComposable(f"one of several {reference.key} is freed outside of them")
            events.append((reference, name))
            at += 1
        modules.append((module, len(events) - before))
    return Template(events, template.blocks, template.kept, modules)


def _is_per_microbatch(key: SpanKey) -> bool:
    return isinstance(key.what, RankAction) and key.what.microbatch != NO_MICROBATCH


def _repeated_frees(events: Sequence[Any], captured: ShortCapture) -> tuple[RepeatedFrees | None, int]:
    """The frees that repeat for each microbatch from the first event on, and their number; else (None, 0)."""
    best: tuple[RepeatedFrees | None, int] = None, 0
    if not events or (reference := events[0][0]) is None or not _is_per_microbatch(reference.key):
        return best
    for period in range(1, min(_LONGEST_PERIOD, len(events) // 2) + 1):
        first = _frees_of_one_microbatch(events[:period])
        if first is None:
            break
        frees, run = first[0], [first[1]]
        step = 0
        for start in range(period, len(events) - period + 1, period):
            other = _frees_of_one_microbatch(events[start : start + period])
            if other is None or other[0] != frees or abs(other[1] - run[-1]) != 1:
                break
            if step not in (0, other[1] - run[-1]):
                break
            step = other[1] - run[-1]
            run.append(other[1])
        count = captured.order(reference.key.step).num_microbatches
        low, spare = min(run), count - 1 - max(run)
        if len(run) > 1 and low < 2 and spare < 2 and len(run) * period > best[1]:
            best = RepeatedFrees(frees, step > 0, low, spare), len(run) * period
    return best


def _frees_of_one_microbatch(events: Sequence[Any]) -> tuple[tuple[tuple[Reference, SpanBlock], ...], int] | None:
    """What events free if all of it belongs to one microbatch, and that microbatch."""
    found = set()
    frees = []
    for reference, name in events:
        if reference is None or not _is_per_microbatch(reference.key):
            return None
        found.add(reference.key.what.microbatch)
        frees.append((Reference("same", of_microbatch(reference.key, 0)), name))
    return (tuple(frees), found.pop()) if len(found) == 1 else None
