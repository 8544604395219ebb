"""The estimate of a run: every pipeline rank's peaks by two engines, the worst of them, and verdicts per GPU type."""

from collections.abc import Sequence
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
from titan_tools.memory.trace.kernels import gpu_kernels
from titan_tools.memory.trace.traced import trace_rank
from titan_tools.memory.verdict import Verdict, judge, nvidia_smi_gib
from trainer.config.sections import Config


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """What the fullest of the ranks that share a pp coordinate needs.

    `formula` is the closed form's peak of a steady step, None where it does not describe the run.
    """

    pp_rank: int
    replayed: Replayed
    other_reserved_bytes: int  # under the other allocator
    nvidia_smi_gib: tuple[float, float]
    formula: Instant | None

    @property
    def step1(self) -> Peak:
        return self.replayed.step1

    @property
    def steady(self) -> Peak:
        return self.replayed.steady

    @property
    def worst(self) -> Peak:
        return max(self.step1, self.steady, key=lambda peak: peak.allocated_bytes)

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
    allocator: AllocatorName
    ranks: tuple[RankEstimate, ...]
    verdicts: tuple[Verdict, ...]
    formula_gaps: tuple[str, ...]
    assumptions: tuple[str, ...]
    changes: tuple[Change, ...]  # that would save the most

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
    other: AllocatorName = "classic" if allocator == "expandable" else "expandable"
    kernels = gpu_kernels(counted)
    ranks = []
    for pp_rank in range(dims.pp):
        trace = trace_rank(config, run.args, dims, rank=pp_rank * (dims.world_size // dims.pp), kernels=kernels)
        replayed, beside = replay(trace, allocator=allocator), replay(trace, allocator=other)
        ranks.append(
            RankEstimate(
                pp_rank,
                replayed,
                other_reserved_bytes=max(beside.step1.reserved_bytes, beside.steady.reserved_bytes),
                nvidia_smi_gib=nvidia_smi_gib(
                    max(replayed.step1.reserved_bytes, replayed.steady.reserved_bytes),
                    num_communicators=num_communicators,
                ),
                formula=None if gaps else peak_instant(run, pp_rank=pp_rank, gpu=counted, steady=True),
            )
        )
    return Estimate(
        run,
        counted,
        allocator,
        tuple(ranks),
        _verdicts([gpu] if gpu else [*GPUS.values()], ranks, allocator, num_communicators),
        tuple(gaps),
        assumptions_of(run, counted, allocator),
        tuple(changes(config, dims, counted)),
    )


def _verdicts(
    gpus: Sequence[Gpu], ranks: Sequence[RankEstimate], allocator: AllocatorName, num_communicators: int
) -> tuple[Verdict, ...]:
    reserved_bytes = max(rank.reserved_bytes for rank in ranks)
    traces = [rank.replayed.trace for rank in ranks]
    return tuple(
        judge(
            gpu,
            reserved_bytes=reserved_bytes,
            traces=traces,
            allocator=allocator,
            num_communicators=num_communicators,
        )
        for gpu in gpus
    )
