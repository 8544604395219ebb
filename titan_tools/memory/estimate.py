"""The estimate of a run: every pipeline rank's peaks by two engines, the worst of them, and verdicts per GPU type."""

from collections.abc import Iterator
from dataclasses import dataclass

from converters.layout import MeshShape
from titan_tools.memory.assumptions import assumptions_of
from titan_tools.memory.constants import ENGINES_AGREE, GPUS, Gpu
from titan_tools.memory.formula.closed_form import Instant, peak_instant
from titan_tools.memory.formula.coverage import formula_gaps
from titan_tools.memory.formula.from_config import run_shape
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.gpus import DEFAULT
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.peaks import Peak
from titan_tools.memory.replay.replay import Replayed, replay
from titan_tools.memory.suggestions import Change, changes
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels.kernels import gpu_kernels
from titan_tools.memory.trace.pipeline.ranks import Job, kinds_of_ranks, traced_kind
from titan_tools.memory.verdict import Verdict, judge, nvidia_smi_gib
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
        return max(self.ranks, key=lambda rank: rank.reserved_bytes)

    @property
    def disagreeing(self) -> tuple[RankEstimate, ...]:
        """Ranks of which the two engines say different things."""
        return tuple(rank for rank in self.ranks if abs(rank.engines_differ_by or 0) > ENGINES_AGREE)


def estimate(config: Config, dims: MeshShape, *, gpu: Gpu | None, allocator: AllocatorName) -> Estimate:
    """Peaks per pipeline rank. The layout must have been checked, and be covered. Without a GPU type all are judged."""
    run, counted = run_shape(config, world_size=dims.world_size), gpu or DEFAULT
    gaps = formula_gaps(config, dims)
    num_communicators = sum(degree > 1 for degree in (dims.pp, dims.dp_replicate, dims.fsdp, dims.tp, dims.cp))
    ranks: list[RankEstimate] = []
    fullest: Replayed | None = None  # of all others only the peaks are kept: traces are large
    for pp_rank, trace in _traces(Job(config, run.args, dims, gpu_kernels(counted))):
        replayed = replay(trace, allocator=allocator)
        reserved_bytes = _reserved_bytes(replayed)
        ranks.append(
            RankEstimate(
                pp_rank,
                replayed.step1,
                replayed.steady,
                replayed.worst(),
                nvidia_smi_gib(reserved_bytes, num_communicators=num_communicators),
                None if gaps else peak_instant(run, pp_rank=pp_rank, gpu=counted, steady=True),
            )
        )
        if fullest is None or reserved_bytes > _reserved_bytes(fullest):
            fullest = replayed
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
        assumptions_of(run, counted, allocator),
        tuple(changes(config, dims, counted)),
    )


def _traces(job: Job) -> Iterator[tuple[int, Trace]]:
    """Pipeline ranks with their traces, one after the other, in the order in which they are made."""
    for pp_ranks in kinds_of_ranks(job):
        yield from traced_kind(job, pp_ranks)


def _reserved_bytes(replayed: Replayed) -> int:
    return max(replayed.step1.reserved_bytes, replayed.steady.reserved_bytes)
