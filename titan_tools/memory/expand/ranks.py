"""A rank's trace at any depth: of few layers, expanded; of all where the model is shallow or its layers differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from converters.collector import collector_paused
from converters.families.base import ModelArgs
from converters.layout import MeshShape
from titan_tools.memory.expand.compose import compose
from titan_tools.memory.expand.layers import Shallow, expand_layers, layer_period, shallow_model
from titan_tools.memory.expand.order import Order, of_one_microbatch, orders_of_ranks, run_short_order, shortest
from titan_tools.memory.expand.pieces import Aperiodic
from titan_tools.memory.expand.spans import NotComposable, ShortCapture, Templates
from titan_tools.memory.expand.templates import read_templates
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import NO_LAYER, Trace, layer_of
from titan_tools.memory.trace.kernels import Kernels
from trainer.config.sections import Config
from trainer.job import samples_per_step
from trainer.stages import SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, StageSplit, split_model


def trace_rank(
    config: Config, args: ModelArgs, dims: MeshShape, *, rank: int, kernels: Kernels, num_steps: int = 2
) -> Trace:
    """What `capture` gives, event for event, mostly without running all layers. The layout must have been checked."""
    if shallow := shallow_model(config, args, dims, rank=rank):
        trace = capture(shallow.config, shallow.args, dims, rank=rank, kernels=kernels, num_steps=num_steps)
        try:
            return expand_layers(trace, shallow.depths)
        except Aperiodic:
            pass  # layers that differ are all to be run
    return capture(config, args, dims, rank=rank, kernels=kernels, num_steps=num_steps)


@dataclass(frozen=True, slots=True)
class TraceJob:
    """What is traced. The layout must have been checked."""

    config: Config
    args: ModelArgs
    dims: MeshShape
    kernels: Kernels
    num_steps: int = 2

    @property
    def split(self) -> StageSplit:
        return split_model(self.config.parallelism, self.args.num_layers, self.dims.pp)

    def global_rank(self, pp_rank: int) -> int:
        """The first rank of this coordinate: the pipeline's axis is the outermost one."""
        return pp_rank * (self.dims.world_size // self.dims.pp)


def trace_ranks(
    config: Config, args: ModelArgs, dims: MeshShape, *, kernels: Kernels, num_steps: int = 2
) -> dict[int, Trace]:
    """Each pipeline rank's trace, all at once; `traced_kinds` gives one after the other, in less memory."""
    job = TraceJob(config, args, dims, kernels, num_steps)
    return dict(sorted(traced_kinds(job, kinds_of_ranks(job))))


def kinds_of_ranks(job: TraceJob) -> list[list[int]]:
    """Pipeline ranks, together where they hold stages of the same kinds."""
    split, period = job.split, layer_period(job.config.activation_checkpoint)
    shallow = shallow_model(job.config, job.args, job.dims, rank=0)
    few = replace(job, config=shallow.config, args=shallow.args).split if shallow else split
    kinds: dict[tuple, list[int]] = {}
    for pp_rank in range(job.dims.pp):
        stages = split.stages_of(pp_rank)
        kind = tuple(
            (
                stage == 0,
                stage == split.num_stages - 1,
                stage + 1 in stages,
                tuple(
                    name if (number := layer_of(name)) == NO_LAYER else number % period for name in few.modules[stage]
                ),
            )
            for stage in stages
        )
        kinds.setdefault(kind, []).append(pp_rank)
    return list(kinds.values())


def traced_kinds(job: TraceJob, kinds: Sequence[Sequence[int]]) -> Iterator[tuple[int, Trace]]:
    """Pipeline ranks of these kinds with their traces, one after the other."""
    for pp_ranks in kinds:
        yield from _traced_kind(job, pp_ranks)


def _traced_kind(job: TraceJob, pp_ranks: Sequence[int]) -> Iterator[tuple[int, Trace]]:
    kind = None if job.dims.pp == 1 else _capture_kind(job, pp_ranks)
    for pp_rank in pp_ranks:
        yield (
            pp_rank,
            (kind and _compose_rank(job, kind, pp_rank))
            or trace_rank(
                job.config,
                job.args,
                job.dims,
                rank=job.global_rank(pp_rank),
                kernels=job.kernels,
                num_steps=job.num_steps,
            ),
        )


@dataclass(slots=True)
class _Kind:
    """A rank captured with few layers, in a short order, for all ranks like it."""

    orders: dict[int, Order]
    captured: ShortCapture
    trace: Trace
    shallow: Shallow | None  # None: with all layers
    templates: dict[tuple[int, ...], tuple[Templates, list[int]]] = field(default_factory=dict)  # by depths of stages


def _capture_kind(job: TraceJob, pp_ranks: Sequence[int]) -> _Kind | None:
    parallelism, training = job.config.parallelism, job.config.training
    schedule = parallelism.pipeline_parallel_schedule
    num_microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    reshards = parallelism.fsdp_reshard_after_forward == "always"
    orders = orders_of_ranks(schedule, job.split, job.dims.pp, num_microbatches, reshards=reshards)
    if (found := shortest([orders[pp_rank] for pp_rank in pp_ranks], schedule)) is None:
        return None
    number, short = found
    pp_rank = pp_ranks[number]
    rank = job.global_rank(pp_rank)
    shallow = shallow_model(job.config, job.args, job.dims, rank=rank)
    few = replace(job, config=shallow.config, args=shallow.args) if shallow else job
    # Where stages hand tensors to each other, or gradients wait for their weights, steps leave something for the next.
    is_plain = schedule not in (*V_SCHEDULES, *SPLIT_BACKWARD_SCHEDULES)
    captured = ShortCapture(
        stages=tuple(job.split.stages_of(pp_rank)),
        short=short,
        shorter=of_one_microbatch(short, schedule) if is_plain else short,
        num_steps=job.num_steps,
        num_microbatches=num_microbatches,
        num_batches=samples_per_step(training, job.dims.batch) // job.dims.batch // training.local_batch_size,
    )
    with run_short_order(schedule, captured.orders()):
        trace = capture(few.config, few.args, job.dims, rank=rank, kernels=job.kernels, num_steps=job.num_steps)
    return _Kind(orders, captured, trace, shallow)


@collector_paused()
def _compose_rank(job: TraceJob, kind: _Kind, pp_rank: int) -> Trace | None:
    """This rank's trace; None where it has to be captured for itself."""
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


def _with_all_layers(job: TraceJob, kind: _Kind, pp_rank: int) -> Trace:
    """The kind's short trace with as many layers as this rank has."""
    if kind.shallow is None:
        return kind.trace
    whole = shallow_model(job.config, job.args, job.dims, rank=job.global_rank(pp_rank))
    assert whole, "stages of all ranks are cut together"
    depths = [
        replace(wanted, captured=few.captured) for few, wanted in zip(kind.shallow.depths, whole.depths, strict=True)
    ]
    return expand_layers(kind.trace, depths)
