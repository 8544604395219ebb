"""The estimate of a published run: its trace as built then, replayed by its allocator, beside the closed form."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from converters.families.registry import get_family
from titan_tools.memory.constants import GIB, Gpu
from titan_tools.memory.formula.closed_form import peak_instant
from titan_tools.memory.formula.from_config import run_shape
from titan_tools.memory.formula.run_shape import BuildTraits
from titan_tools.memory.published.as_built_then import as_built_then
from titan_tools.memory.published.rows import Row, load
from titan_tools.memory.published.then import Then, then_of
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.peaks import Peak
from titan_tools.memory.replay.replay import replay
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import gpu_kernels
from titan_tools.memory.verdict import judge
from trainer.parallel_dims import resolve


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is estimated for a row, in the row's metric. [low, high] where its flags are not known, else one number."""

    row: Row
    then: Then
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


def estimate(row: Row) -> Estimate:
    """All layers are traced: the last one is not always like the others, and states come with the first step."""
    then = then_of(row)
    trace = _trace(row.settings, row.world_size, row.gpu, then)
    allocators = (row.allocator,) if row.is_scored else get_args(AllocatorName)
    peaks = [_peak(row, trace, allocator) for allocator in allocators]
    found = [(p.allocated_bytes if row.metric == "active" else p.reserved_bytes) / GIB for p in peaks]
    verdict = judge(
        replace(row.gpu, usable_gib=row.total_gib),
        reserved_bytes=min(p.reserved_bytes for p in peaks),
        traces=[trace],
        allocator=row.allocator,
        num_communicators=sum(degree > 1 for degree in (row.dp_shard, row.dp_replicate, row.tp, row.pp, row.cp)),
    ).verdict
    return Estimate(
        row, then, min(found), max(found), peaks[0].allocated_bytes / GIB, _closed_form_gib(row, then), verdict
    )


def _peak(row: Row, trace: Trace, allocator: AllocatorName) -> Peak:
    replayed = replay(trace, allocator=allocator)
    return replayed.step1 if row.is_first_step else replayed.steady


@lru_cache(maxsize=2)  # rows of one run follow each other
def _trace(settings: tuple[str, ...], world_size: int, gpu: Gpu, then: Then) -> Trace:
    config = load(settings)
    dims = resolve(config.parallelism, world_size)
    # flash attention, also on Hopper: torchtitan put cuDNN's first on Blackwell only; norms are as_built_then's
    kernels = replace(gpu_kernels(gpu), attention="flash", norm="own")
    args = get_family(config.model.name).flavors[config.model.flavor]
    with as_built_then(then, tp=dims.tp):
        return capture(config, args, dims, rank=0, kernels=kernels)


def _closed_form_gib(row: Row, then: Then) -> float | None:
    """Allocated at the peak. It knows our loss on vocabulary shards, not torch's loss parallel."""
    if row.is_compiled or row.float8 != "none" or then.loss_chunks or then.keeps_logits or row.tp > 1:
        return None
    traits = BuildTraits(
        norm=then.norm,
        embeddings_with_root=then.has_ends_in_root,
        last_block_kept=then.is_last_block_kept,
        states_from_start=False,
        stored_gathers=False,
        loss_in_forward=False,
    )
    run = run_shape(load(row.settings), world_size=row.world_size)
    reshard_output = run.reshard_output and not then.has_ends_in_root
    run = replace(run, traits=traits, reshard_output=reshard_output)
    return peak_instant(run, pp_rank=0, gpu=row.gpu, steady=not row.is_first_step).total_bytes / GIB
