"""The estimate of a run: every pipeline rank's peaks by two engines, the worst of them, and verdicts per GPU type."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from converters.layout import MeshShape
from titan_tools.memory.constants import ENGINES_AGREE, GPUS, Gpu
from titan_tools.memory.expand.ranks import TraceJob, kinds_of_ranks, traced_kinds
from titan_tools.memory.formula.closed_form import peak_instant
from titan_tools.memory.formula.coverage import formula_gaps
from titan_tools.memory.formula.rank import Instant
from titan_tools.memory.formula.run_shape import RunShape, run_shape
from titan_tools.memory.gpus import DEFAULT
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.replay import Peak, Replayed, replay
from titan_tools.memory.suggestions import Change, changes
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import gpu_kernels
from titan_tools.memory.two_processes import beside
from titan_tools.memory.verdict import Verdict, assumptions_of, judge, nvidia_smi_gib
from trainer.config.sections import Config


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """What the fullest of the ranks that share a pp coordinate needs.

    `formula` is the closed form's peak of a steady step, None where it does not describe the run.
    """

    pp_rank: int
    step1: Peak
    steady: Peak
    worst: Peak  # over all steps
    nvidia_smi_gib: tuple[float, float]
    formula: Instant | None

    @property
    def reserved_bytes(self) -> int:
        return max(self.step1.reserved_bytes, self.steady.reserved_bytes)

    @property
    def engines_differ_by(self) -> float | None:
        """The closed form's share above (or below) what was traced; None without a closed form."""
        if self.formula is None:
            return None
        return self.formula.total_bytes / self.steady.allocated_bytes - 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """All that is said of a run, on the GPU type whose kernels were counted."""

    run: RunShape
    gpu: Gpu
    ranks: tuple[RankEstimate, ...]
    fullest: Replayed  # the trace of `fullest_rank`
    other_reserved_bytes: int  # what that rank reserves under the other allocator
    verdicts: tuple[Verdict, ...]
    formula_gaps: tuple[str, ...]
    assumptions: tuple[str, ...]
    changes: tuple[Change, ...]  # that would save the most

    @property
    def allocator(self) -> AllocatorName:
        return self.fullest.allocator

    @property
    def worst_rank(self) -> RankEstimate:
        """The rank that allocates the most at once."""
        return max(self.ranks, key=lambda rank: rank.worst.allocated_bytes)

    @property
    def fullest_rank(self) -> RankEstimate:
        """The rank that reserves the most, which decides whether the run fits."""
        return max(self.ranks, key=_fullness)

    @property
    def disagreeing(self) -> tuple[RankEstimate, ...]:
        """Ranks of which the two engines say different things."""
        return tuple(rank for rank in self.ranks if abs(rank.engines_differ_by or 0) > ENGINES_AGREE)


def estimate(config: Config, dims: MeshShape, *, gpu: Gpu | None, allocator: AllocatorName) -> Estimate:
    """Peaks per pipeline rank. The layout must have been checked, and be covered. Without a GPU type all are judged."""
    run, counted = run_shape(config, world_size=dims.world_size), gpu or DEFAULT
    gaps = formula_gaps(config, dims)
    num_communicators = sum(degree > 1 for degree in (dims.pp, dims.dp_replicate, dims.fsdp, dims.tp, dims.cp))

    def estimated(pp_rank: int, replayed: Replayed) -> RankEstimate:
        return RankEstimate(
            pp_rank,
            replayed.step1,
            replayed.steady,
            replayed.worst(),
            nvidia_smi_gib(
                _reserved_bytes(replayed),
                num_communicators=num_communicators,
                symmetric_bytes=replayed.trace.symmetric_bytes,
            ),
            None if gaps else peak_instant(run, pp_rank=pp_rank, gpu=counted, steady=True),
        )

    job = TraceJob(config, run.args, dims, gpu_kernels(counted))
    ranks, fullest = _all_ranks(job, allocator, estimated)
    judged = [gpu] if gpu else GPUS.values()
    return Estimate(
        run,
        counted,
        tuple(sorted(ranks, key=lambda rank: rank.pp_rank)),
        fullest,
        _reserved_bytes(replay(fullest.trace, allocator="classic" if allocator == "expandable" else "expandable")),
        tuple(
            judge(
                candidate,
                reserved_bytes=_reserved_bytes(fullest),
                traces=[fullest.trace],
                allocator=allocator,
                num_communicators=num_communicators,
            )
            for candidate in judged
        ),
        tuple(gaps),
        assumptions_of(run, counted, allocator, has_symmetric_memory=fullest.trace.symmetric_bytes > 0),
        tuple(changes(config, dims, counted)),
    )


Estimated = Callable[[int, Replayed], RankEstimate]


def _all_ranks(job: TraceJob, allocator: AllocatorName, estimated: Estimated) -> tuple[list[RankEstimate], Replayed]:
    """All pipeline ranks, in two processes where they are of several kinds, and the trace of the fullest of them.

    Where layers are compiled, in one: that takes longer than all else, is done once, and memory for it is needed once.
    """
    kinds = kinds_of_ranks(job)
    mine, others = (kinds, []) if job.config.compile.enable else _two_shares(kinds)
    if not others:
        with _sharing_compiled_code(job.config):
            ranks, fullest = _share(traced_kinds(job, mine), allocator, estimated)
        return ranks, fullest
    with beside(lambda: _share(traced_kinds(job, others), allocator, estimated)) as beside_this:
        own = _share(traced_kinds(job, mine), allocator, estimated)
        ranks, more = next(own), next(beside_this)
        fullest = next(own if max(ranks, key=_fullness) is max(ranks + more, key=_fullness) else beside_this)
        return ranks + more, fullest


def _sharing_compiled_code(config: Config) -> AbstractContextManager[None]:
    if not config.compile.enable or not config.compile.components:
        return nullcontext()
    from titan_tools.memory.trace.compile import share_compiled_code

    return share_compiled_code(config)


def _share(
    traces: Iterator[tuple[int, Trace]], allocator: AllocatorName, estimated: Estimated
) -> Iterator[Any]:  # a list of RankEstimate, and a Replayed
    """Pipeline ranks of some kinds, then the trace of the fullest; of all others only the peaks are kept."""
    ranks: list[RankEstimate] = []
    fullest: Replayed | None = None
    for pp_rank, trace in traces:
        replayed = replay(trace, allocator=allocator)
        ranks.append(estimated(pp_rank, replayed))
        if ranks[-1] is max(ranks, key=_fullness):
            fullest = replayed
    yield ranks
    yield fullest


def _two_shares(kinds: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Kinds of ranks with about the same work on both sides, and the first kind, often the fullest, on the first side.

    A kind is captured once, which takes as long as to compose and replay about four ranks.
    """
    sides: tuple[list[Sequence[int]], list[Sequence[int]]] = [], []
    for kind in sorted(kinds, key=len, reverse=True):
        min(sides, key=lambda side: sum(len(other) + 4 for other in side)).append(kind)
    mine, others = sorted(sides, key=lambda side: kinds[0] not in side)
    return mine, others


def _fullness(rank: RankEstimate) -> tuple[int, int]:
    return rank.reserved_bytes, -rank.pp_rank


def _reserved_bytes(replayed: Replayed) -> int:
    return max(replayed.step1.reserved_bytes, replayed.steady.reserved_bytes)
