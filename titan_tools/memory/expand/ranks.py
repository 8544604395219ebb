"""The traces of all pipeline ranks of a job, mostly from few captures: of few layers and few microbatches.

Ranks whose stages are of the same kinds (the first one, one in the middle, the last one) share a capture. It is
expanded to all layers, then to all microbatches in each rank's own order of actions. A rank for which that is not
proven right is captured in full.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from converters.common.collector import collector_paused
from titan_tools.memory.expand.compose import compose
from titan_tools.memory.expand.layers import Shallow, expand_layers, kinds_of_layers, repetitions, shallow_model
from titan_tools.memory.expand.order import Order, of_one_microbatch, orders_of_ranks, run_short_order, shortest
from titan_tools.memory.expand.pieces import Aperiodic
from titan_tools.memory.expand.spans import NotComposable, ShortCapture, Templates
from titan_tools.memory.expand.templates import read_templates
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import NO_LAYER, Trace, layer_of
from titan_tools.memory.trace.kernels import Kernels
from trainer.job.record import Job
from trainer.parallel.stages import SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES


def trace_rank(job: Job, *, rank: int, kernels: Kernels, num_steps: int = 2) -> Trace:
    """What `capture` returns, event for event, usually from few layers."""
    if shallow := shallow_model(job, rank=rank):
        trace = capture(shallow.job, rank=rank, kernels=kernels, num_steps=num_steps)
        try:
            return expand_layers(trace, shallow.depths)
        except Aperiodic:
            pass  # layers that differ must all run
    return capture(job, rank=rank, kernels=kernels, num_steps=num_steps)


def trace_ranks(job: Job, *, kernels: Kernels, num_steps: int = 2) -> dict[int, Trace]:
    """Each pipeline rank's trace, all at once; `traced_kinds` yields one at a time, in less memory."""
    return dict(sorted(traced_kinds(job, kinds_of_ranks(job), kernels=kernels, num_steps=num_steps)))


def global_rank(job: Job, pp_rank: int) -> int:
    """The first rank with this pipeline coordinate, the outermost one, and the second of its context ranks.

    The first of them keeps less of attention: for its first chunk there are no keys before the chunk's own.
    """
    dims = job.dims
    return pp_rank * (dims.world_size // dims.pp) + (dims.tp if dims.cp > 1 else 0)


def kinds_of_ranks(job: Job) -> list[list[int]]:
    """Pipeline ranks, grouped by the kinds of their stages."""
    of_layer, repeats = kinds_of_layers(job), repetitions(job)
    shallow = shallow_model(job, rank=0)
    modules = (shallow.job if shallow else job).split.modules
    kinds: dict[tuple[object, ...], list[int]] = {}
    for pp_rank in range(job.dims.pp):
        stages = job.split.stages_of(pp_rank)
        kind = tuple(
            (
                stage == 0,
                stage == job.split.num_stages - 1,
                stage + 1 in stages,
                repeats[stage],
                tuple(name if (number := layer_of(name)) == NO_LAYER else of_layer[number] for name in modules[stage]),
            )
            for stage in stages
        )
        kinds.setdefault(kind, []).append(pp_rank)
    return list(kinds.values())


def traced_kinds(
    job: Job,
    kinds: Sequence[Sequence[int]],
    *,
    kernels: Kernels,
    num_steps: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[int, Trace]]:
    """The pipeline ranks of these kinds with their traces, one after the other; `say` gets what is traced."""
    uneven = f", experts receive {kernels.imbalance:g} times the mean" if kernels.imbalance > 1 else ""
    for pp_ranks in kinds:
        of_ranks = f" of pipeline rank{'s' if len(pp_ranks) > 1 else ''} {', '.join(map(str, pp_ranks))}"
        say(f"tracing a training step{of_ranks if job.dims.pp > 1 else ''}{uneven}")
        kind = None if job.dims.pp == 1 else _capture_kind(job, pp_ranks, kernels, num_steps)
        for pp_rank in pp_ranks:
            trace = kind and _compose_rank(job, kind, pp_rank)
            yield (
                pp_rank,
                trace or trace_rank(job, rank=global_rank(job, pp_rank), kernels=kernels, num_steps=num_steps),
            )


@dataclass(slots=True)
class _Kind:
    """A rank captured with few layers, in a short order, for all ranks like it."""

    orders: dict[int, Order]
    captured: ShortCapture
    trace: Trace
    shallow: Shallow | None  # None: with all layers
    templates: dict[tuple[int, ...], tuple[Templates, list[int]]] = field(default_factory=dict)  # by depths of stages


def _capture_kind(job: Job, pp_ranks: Sequence[int], kernels: Kernels, num_steps: int) -> _Kind | None:
    parallelism = job.config.parallelism
    schedule = job.schedule
    reshards = parallelism.fsdp_reshard_after_forward == "always"
    orders = orders_of_ranks(schedule, job.split, job.dims.pp, job.num_microbatches, reshards=reshards)
    if (found := shortest([orders[pp_rank] for pp_rank in pp_ranks], schedule)) is None:
        return None
    number, short = found
    pp_rank = pp_ranks[number]
    rank = global_rank(job, pp_rank)
    shallow = shallow_model(job, rank=rank)
    # Where stages of a rank pass tensors to each other, or weights' gradients wait, a step leaves some for the next.
    is_plain = schedule not in (*V_SCHEDULES, *SPLIT_BACKWARD_SCHEDULES)
    captured = ShortCapture(
        stages=tuple(job.split.stages_of(pp_rank)),
        short=short,
        shorter=of_one_microbatch(short, schedule) if is_plain else short,
        num_steps=num_steps,
        num_microbatches=job.num_microbatches,
        num_batches=job.num_accumulated,
    )
    with run_short_order(schedule, captured.orders()):
        trace = capture(shallow.job if shallow else job, rank=rank, kernels=kernels, num_steps=num_steps)
    return _Kind(orders, captured, trace, shallow)


@collector_paused()
def _compose_rank(job: Job, kind: _Kind, pp_rank: int) -> Trace | None:
    """This rank's trace; None if it has to be captured."""
    stages = job.split.stages_of(pp_rank)
    layers = [[n for n in map(layer_of, job.split.modules[stage]) if n != NO_LAYER] for stage in stages]
    depths = tuple(map(len, layers))
    numbers = [number for of_stage in layers for number in of_stage]
    try:
        if depths not in kind.templates:
            kind.templates[depths] = read_templates(_with_all_layers(job, kind, pp_rank), kind.captured), numbers
        templates, known = kind.templates[depths]
        renamed = dict(zip(known, numbers, strict=True))
        trace = compose(templates, kind.captured, kind.orders[pp_rank], stages=stages, layers=renamed)
        return replace(trace, symmetric_bytes=kind.trace.symmetric_bytes)
    except (Aperiodic, NotComposable):
        return None


def _with_all_layers(job: Job, kind: _Kind, pp_rank: int) -> Trace:
    """The kind's short trace with as many layers as this rank has."""
    if kind.shallow is None:
        return kind.trace
    whole = shallow_model(job, rank=global_rank(job, pp_rank))
    assert whole, "all stages are cut together"
    depths = [
        replace(wanted, captured=few.captured) for few, wanted in zip(kind.shallow.depths, whole.depths, strict=True)
    ]
    return expand_layers(kind.trace, depths)
