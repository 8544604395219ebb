"""The estimate of a published run: its trace as built then, replayed by its allocator, beside the closed form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from converters.errors import UnsupportedError, list_offenders
from converters.families.registry import get_family
from tests.published_memory.historical_build import historical_build
from tests.published_memory.history import HistoricalBuild, build_of, settings_of
from tests.published_memory.rows import Row
from titan_tools.memory.constants import GIB, Gpu
from titan_tools.memory.expand.ranks import TraceJob, kinds_of_ranks, trace_rank
from titan_tools.memory.formula.closed_form import peak_instant
from titan_tools.memory.formula.run_shape import BuildTraits, run_shape
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.replay import Peak, replay
from titan_tools.memory.trace.coverage import trace_gaps
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import gpu_kernels
from titan_tools.memory.verdict import judge
from trainer.config.load import load_config
from trainer.config.sections import Config
from trainer.job import resolve


@dataclass(frozen=True, slots=True)
class RowEstimate:
    """What is estimated for a row, in the row's metric. [low, high] where its flags are not known, else one number."""

    row: Row
    then: HistoricalBuild
    low_gib: float
    high_gib: float
    allocated_gib: float
    closed_gib: float | None  # allocated; None where the closed form has no say
    verdict: str

    @property
    def error(self) -> float | None:
        """Relative to what was published, signed; None where nothing was, or flags are not known."""
        if self.row.gib is None or not self.row.is_scored:
            return None
        return self.high_gib / self.row.gib - 1


def estimate(row: Row) -> RowEstimate:
    """Raises ConfigError for a run that cannot be, UnsupportedError for one that no trace follows."""
    then = build_of(row)
    peaks, verdicts = [], []
    for variant in _variants(row):
        traces = _traces(settings_of(variant), row.world_size, row.gpu, then)
        peaks.append(peak := _fullest(variant, traces))
        verdict = judge(
            replace(row.gpu, usable_gib=row.total_gib),
            reserved_bytes=peak.reserved_bytes,
            traces=traces,
            allocator=variant.allocator,
            num_communicators=sum(degree > 1 for degree in (row.dp_shard, row.dp_replicate, row.tp, row.pp, row.cp)),
        ).verdict
        verdicts.append(verdict)
    found = [_in_metric(row, peak) / GIB for peak in peaks]
    return RowEstimate(
        row,
        then,
        low_gib=min(found),
        high_gib=max(found),
        allocated_gib=peaks[0].allocated_bytes / GIB,
        closed_gib=_closed_form_gib(row, then),
        verdict=verdicts[0],
    )


def _variants(row: Row) -> Iterator[Row]:
    """What the run may have been: as the row says where its flags are known, else also in each other way."""
    yield row
    if row.is_scored:
        return
    compiled = replace(row, is_compiled=True, loss=replace(row.loss, is_compiled=True))
    for each in [row] if row.has_flags else [row, compiled]:
        for is_first_step in [row.is_first_step] if row.has_step else [True, False]:
            for allocator in get_args(AllocatorName):
                yield replace(each, is_first_step=is_first_step, allocator=allocator)


def _fullest(row: Row, traces: Sequence[Trace]) -> Peak:
    replays = [replay(trace, allocator=row.allocator) for trace in traces]
    peaks = [each.step1 if row.is_first_step else each.steady for each in replays]
    return max(peaks, key=lambda peak: _in_metric(row, peak))


def _in_metric(row: Row, peak: Peak) -> int:
    return getattr(peak, f"{row.metric}_bytes")


@lru_cache(maxsize=2)  # rows of one run follow each other
def _traces(settings: tuple[str, ...], world_size: int, gpu: Gpu, then: HistoricalBuild) -> list[Trace]:
    """One per kind of pipeline rank."""
    config = _config(settings)
    dims = resolve(config.parallelism, world_size)
    # flash attention, also on Hopper: torchtitan put cuDNN's first on Blackwell only
    kernels = replace(gpu_kernels(gpu), attention="flash", norm="fused" if then.norm == "fused" else "own")
    args = get_family(config.model.name).flavors[config.model.flavor]
    if gaps := [gap.reason for gap in trace_gaps(config, dims)]:
        raise UnsupportedError("no trace follows:" + list_offenders(gaps))
    # Of pipeline ranks alike the first has the most microbatches under way.
    job = TraceJob(config, args, dims, kernels)
    with historical_build(then, tp=dims.tp):
        return [
            trace_rank(config, args, dims, rank=job.global_rank(pp_ranks[0]), kernels=kernels)
            for pp_ranks in kinds_of_ranks(job)
        ]


def _config(settings: tuple[str, ...]) -> Config:
    return load_config(settings[0], settings[1:])


def _closed_form_gib(row: Row, then: HistoricalBuild) -> float | None:
    """Allocated at the peak, where torchtitan did nothing that it does not know of.

    It knows our loss on vocabulary shards, not torch's loss parallel; and keys and values that are kept as they are,
    not repeated for every query head, which makes no difference where attention's inputs are computed again.
    """
    is_other_loss = then.loss_chunks or then.num_logits_kept or then.has_wide_logits or row.tp > 1
    is_kept_otherwise = row.checkpointing not in (("full", "op"), ("selective", "op"))
    if row.is_compiled or row.float8 or is_other_loss or is_kept_otherwise:
        return None
    traits = BuildTraits(
        norm=then.norm,
        embeddings_with_root=then.has_ends_in_root,
        # resharded or not: what it was gathered in goes with the next group's arrival, and none follows
        last_block_kept=then.has_ends_in_root,
        states_from_start=False,
        stored_gathers=False,
        loss_in_forward=False,
    )
    run = run_shape(_config(settings_of(row)), world_size=row.world_size)
    reshard_output = run.reshard_output and not then.has_ends_in_root
    run = replace(run, traits=traits, reshard_output=reshard_output)
    return peak_instant(run, pp_rank=0, gpu=row.gpu, steady=not row.is_first_step).total_bytes / GIB
