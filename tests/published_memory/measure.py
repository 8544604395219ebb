"""The estimate of a published run: a trace of the build of its date, replayed with its allocator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from converters.common.errors import UnsupportedError, list_offenders
from converters.common.sizes import GIB
from tests.published_memory.historical_build import historical_build
from tests.published_memory.history import (
    HistoricalBuild,
    build_of,
    possible_dates,
    possible_microbatch_sizes,
    settings_of,
)
from tests.published_memory.rows import Row
from titan_tools.memory.estimate import sharing_compiled_code
from titan_tools.memory.expand.ranks import global_rank, kinds_of_ranks, trace_rank, traced_kinds
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.replay import Peak, replay
from titan_tools.memory.trace.coverage import trace_gaps
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import gpu_kernels
from titan_tools.memory.verdict import TOO_CLOSE, judge
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import Gpu


@dataclass(frozen=True, slots=True)
class RowEstimate:
    """What is estimated for a row, in the row's metric. [low, high] where its flags are not known, else one number."""

    row: Row
    build: HistoricalBuild
    low_gib: float
    high_gib: float
    allocated_gib: float
    verdict: str

    @property
    def error(self) -> float | None:
        """Relative to what was published, signed; None where nothing was, or flags are not known."""
        if self.row.gib is None or not self.row.is_scored:
            return None
        return self.high_gib / self.row.gib - 1

    @property
    def outside_by(self) -> float | None:
        """Of a row that leaves something open: by what share the published peak is outside of the interval, signed.

        0 inside. Of a floor, more than it is inside. None where the run is not rebuilt, or nothing was published.
        """
        if self.row.gib is None or self.row.is_scored or self.row.is_of_graph_trainer:
            return None
        if self.row.gib < self.low_gib:
            return self.row.gib / self.low_gib - 1
        return 0.0 if self.build.is_floor and self.row.pp == 1 else max(self.row.gib / self.high_gib - 1, 0.0)


def estimate(row: Row) -> RowEstimate:
    """Raises ConfigError for a run that cannot be, UnsupportedError for one that no trace follows."""
    peaks, verdicts = [], []
    if row.ep == 1 and row.tp > 1 and build_of(row).has_experts:
        raise UnsupportedError("experts that tensor parallelism slices are not rebuilt")
    for variant in _variants(row):
        traces = _traces(settings_of(variant), row.world_size, row.gpu, build_of(variant))
        trace, peak = _fullest(variant, traces)
        peaks.append(peak)
        verdict = judge(
            replace(row.gpu, usable_gib=row.total_gib),
            reserved_bytes=peak.reserved_bytes,
            trace=trace,
            allocator=variant.allocator,
            num_communicators=sum(degree > 1 for degree in (row.dp_shard, row.dp_replicate, row.tp, row.pp, row.cp)),
        ).verdict
        verdicts.append(verdict)
    found = [_in_metric(row, peak) / GIB for peak in peaks]
    return RowEstimate(
        row,
        build_of(row),
        low_gib=min(found),
        high_gib=max(found),
        allocated_gib=peaks[0].allocated_bytes / GIB,
        verdict=verdicts[0] if len({*verdicts}) == 1 else TOO_CLOSE,
    )


def _variants(row: Row) -> Iterator[Row]:
    """What the run may have been: as the row says where its flags are known, else also in each other way."""
    if row.is_scored:
        yield row
        return
    other = replace(row, is_compiled=not row.is_compiled, loss=replace(row.loss, is_compiled=True))
    builds = [row] if row.has_flags else [row, other]
    dated = [replace(build, date=date) for build in builds for date in possible_dates(build)]
    for each in (replace(build, microbatch_size=size) for build in dated for size in possible_microbatch_sizes(build)):
        for is_first_step in [row.is_first_step] if row.has_step else [True, False]:
            for allocator in get_args(AllocatorName):
                yield replace(each, is_first_step=is_first_step, allocator=allocator)


def _fullest(row: Row, traces: Sequence[Trace]) -> tuple[Trace, Peak]:
    replays = [replay(trace, allocator=row.allocator) for trace in traces]
    peaks = [(each.trace, each.step1 if row.is_first_step else each.steady) for each in replays]
    return max(peaks, key=lambda found: _in_metric(row, found[1]))


def _in_metric(row: Row, peak: Peak) -> int:
    return peak.reserved_bytes if row.metric == "reserved" else peak.allocated_bytes


@lru_cache(maxsize=2)  # rows of one run follow each other
def _traces(settings: tuple[str, ...], world_size: int, gpu: Gpu, build: HistoricalBuild) -> list[Trace]:
    """One per kind of pipeline rank."""
    job = resolve_job(load_config(settings[0], settings[1:]), world_size)
    # flash attention, also on Hopper: torchtitan preferred cuDNN's on Blackwell only, later everywhere
    kernels = replace(
        gpu_kernels(gpu),
        attention="flash" if build.repeats_keys else "cudnn",
        norm="fused" if build.norm == "fused" else "own",
    )
    if gaps := [gap.reason for gap in trace_gaps(job.config, job.dims)]:
        raise UnsupportedError("no trace follows:" + list_offenders(gaps))
    # Of the pipeline ranks of a kind the first has the most microbatches in flight.
    kinds = [pp_ranks[:1] for pp_ranks in kinds_of_ranks(job)]
    with historical_build(build, tp=job.dims.tp), sharing_compiled_code(job.config):
        if build.num_logits_kept:  # of as many microbatches as the whole order has
            return [trace_rank(job, rank=global_rank(job, pp_rank), kernels=kernels) for (pp_rank,) in kinds]
        return [trace for _, trace in traced_kinds(job, kinds, kernels=kernels)]
