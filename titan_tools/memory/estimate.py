"""The estimate of a run: every pipeline rank's peaks, the fullest rank, and verdicts per GPU type."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from titan_tools.memory.expand.ranks import kinds_of_ranks, traced_kinds
from titan_tools.memory.imbalance import JUDGED_IMBALANCE, worst_imbalance
from titan_tools.memory.replay.allocator import AllocatorName
from titan_tools.memory.replay.replay import Peak, Replayed, replay
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import Kernels, gpu_kernels
from titan_tools.memory.two_processes import run_in_child
from titan_tools.memory.verdict import Verdict, assumptions_of, judge, nvidia_smi_gib
from trainer.config.sections import Config
from trainer.job.record import Job
from trainer.parallel.tied import has_group_of_ends
from trainer.ranks.gpus import DEFAULT_GPU, JUDGED, Gpu
from trainer.ranks.mesh import communicators


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """What the fullest of the ranks that share a pp coordinate needs."""

    pp_rank: int
    step1: Peak
    steady: Peak
    worst: Peak  # over all steps
    nvidia_smi_gib: tuple[float, float]

    @property
    def reserved_bytes(self) -> int:
        return max(self.step1.reserved_bytes, self.steady.reserved_bytes)


@dataclass(frozen=True, slots=True)
class UnevenEstimate:
    """The fullest rank if its experts receive `imbalance` times the mean of all ranks, in every layer."""

    imbalance: float
    rank: RankEstimate
    is_judged: bool  # by the verdicts


@dataclass(frozen=True, slots=True)
class Estimate:
    """Everything that is reported about a job, on the GPU type whose kernels were traced.

    Where memory depends on the router, tokens are spread evenly over the experts, but for `uneven` and the verdicts.
    """

    job: Job
    ranks: tuple[RankEstimate, ...]
    fullest: Replayed  # the trace of `fullest_rank`
    other_reserved_bytes: int  # what that rank reserves with the other allocator
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    uneven: tuple[UnevenEstimate, ...] = ()  # from balanced to the worst case, where memory depends on the router

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


def estimate(
    job: Job,
    *,
    gpu: Gpu | None,
    allocator: AllocatorName,
    imbalance: float = JUDGED_IMBALANCE,
    say: Callable[[str], None] = lambda text: None,
) -> Estimate:
    """Peaks per pipeline rank of a job that a trace can follow. Without a GPU type, verdicts on the usual ones.

    `imbalance`: the rows that experts of the fullest rank receive over the mean of all ranks, in the verdicts. `say`
    gets what is done now.
    """
    traced_gpu, num_shared = gpu or DEFAULT_GPU, len(communicators(job.dims))

    def num_communicators(pp_rank: int) -> int:
        return num_shared + has_group_of_ends(job.args, job.split, pp_rank)

    def of_rank(pp_rank: int, replayed: Replayed) -> RankEstimate:
        return RankEstimate(
            pp_rank,
            replayed.step1,
            replayed.steady,
            replayed.worst(),
            nvidia_smi_gib(
                replayed.reserved_bytes,
                num_communicators=num_communicators(pp_rank),
                symmetric_bytes=replayed.trace.symmetric_bytes,
            ),
        )

    kernels, worst = gpu_kernels(traced_gpu), worst_imbalance(job)
    ranks, fullest = _all_ranks(job, kernels, allocator, of_rank, say=say)
    other = replay(fullest.trace, allocator="classic" if allocator == "expandable" else "expandable")
    judged_imbalance, judged_ranks, judged, uneven = min(imbalance, worst), ranks, fullest, []
    for factor in sorted({1.0, judged_imbalance, worst}) if worst > 1 else ():
        estimated = (ranks, fullest)
        if factor > 1:
            # Only verdicts need what later steps reserve; the optimizer's states are there from the first one on
            num_steps = 2 if factor == judged_imbalance else 1
            uneven_kernels = replace(kernels, imbalance=factor)
            estimated = _all_ranks(job, uneven_kernels, allocator, of_rank, alike=ranks, num_steps=num_steps, say=say)
        uneven.append(UnevenEstimate(factor, max(estimated[0], key=_fullness), factor == judged_imbalance))
        if factor == judged_imbalance:
            judged_ranks, judged = estimated
    num_fullest = num_communicators(max(judged_ranks, key=_fullness).pp_rank)
    verdicts = [
        judge(
            candidate,
            reserved_bytes=judged.reserved_bytes,
            trace=judged.trace,
            allocator=allocator,
            num_communicators=num_fullest,
        )
        for candidate in ([gpu] if gpu else JUDGED)
    ]
    return Estimate(
        job=job,
        ranks=tuple(sorted(ranks, key=lambda rank: rank.pp_rank)),
        fullest=fullest,
        other_reserved_bytes=other.reserved_bytes,
        verdicts=tuple(verdicts),
        assumptions=assumptions_of(
            traced_gpu,
            allocator,
            num_communicators=num_fullest,
            uses_cp=job.dims.cp > 1,
            has_symmetric_memory=fullest.trace.symmetric_bytes > 0,
            imbalance=judged_imbalance if uneven else None,
        ),
        uneven=tuple(uneven),
    )


OfRank = Callable[[int, Replayed], RankEstimate]


def _all_ranks(
    job: Job,
    kernels: Kernels,
    allocator: AllocatorName,
    of_rank: OfRank,
    *,
    alike: Sequence[RankEstimate] = (),
    num_steps: int = 2,
    say: Callable[[str], None],
) -> tuple[list[RankEstimate], Replayed]:
    """All pipeline ranks, and the trace of the fullest one; in two processes if there are several kinds of ranks.

    In one process where layers are compiled: that takes most of the time and memory, and is done once for all ranks.
    `alike`: estimates of the ranks with other kernels: of each kind, only the fullest rank is looked at again.
    """
    kinds = kinds_of_ranks(job)
    if alike:
        fullness = {rank.pp_rank: _fullness(rank) for rank in alike}
        kinds = [[max(kind, key=fullness.__getitem__)] for kind in kinds]
    mine, others = (kinds, []) if job.config.compile.enable else _two_shares(kinds)
    traced = partial(traced_kinds, job, kernels=kernels, num_steps=num_steps, say=say)
    if not others:
        with sharing_compiled_code(job.config):
            ranks, fullest = _share(traced(mine), allocator, of_rank)
        return ranks, fullest
    with run_in_child(lambda: _share(traced(others), allocator, of_rank)) as child:
        own = _share(traced(mine), allocator, of_rank)
        ranks, more = next(own), next(child)
        fullest = next(own if max(ranks, key=_fullness) is max(ranks + more, key=_fullness) else child)
        return ranks + more, fullest


def sharing_compiled_code(config: Config) -> AbstractContextManager[None]:
    """`share_compiled_code`, without loading Inductor where nothing is compiled."""
    if not config.compile.enable or not config.compile.components:
        return nullcontext()
    from titan_tools.memory.trace.compile import share_compiled_code

    return share_compiled_code(config)


def _share(
    traces: Iterator[tuple[int, Trace]], allocator: AllocatorName, of_rank: OfRank
) -> Iterator[Any]:  # a list of RankEstimate, and a Replayed
    """Yields the estimates of some pipeline ranks, then the trace of the fullest; other traces are not kept."""
    ranks: list[RankEstimate] = []
    fullest: Replayed | None = None
    for pp_rank, trace in traces:
        replayed = replay(trace, allocator=allocator)
        ranks.append(of_rank(pp_rank, replayed))
        if ranks[-1] is max(ranks, key=_fullness):
            fullest = replayed
    yield ranks
    yield fullest


def _two_shares(kinds: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Two shares of the kinds of ranks with about the same work; the first kind, often the fullest, in the first share.

    A kind is captured once, which takes as long as composing and replaying about four ranks.
    """
    shares: tuple[list[Sequence[int]], list[Sequence[int]]] = [], []
    for kind in sorted(kinds, key=len, reverse=True):
        min(shares, key=lambda share: sum(len(other) + 4 for other in share)).append(kind)
    mine, others = sorted(shares, key=lambda share: kinds[0] not in share)
    return mine, others


def _fullness(rank: RankEstimate) -> tuple[int, int]:
    return rank.reserved_bytes, -rank.pp_rank
