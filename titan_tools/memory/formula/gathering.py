"""Parameters of whole stages, which a pipeline of several stages per rank gathers ahead and lets go.

torch/distributed/pipelining/schedules.py (_PipelineScheduleRuntime), 2.11 to 2.13.
"""

from collections.abc import Iterator

from titan_tools.memory.formula.rank import Instant, Rank
from titan_tools.memory.schedules import Action


def gather_stage(rank: Rank, action: Action) -> Iterator[Instant]:
    """All of a stage is on its way: one flat result per group. Over one rank there is nothing to gather."""
    groups = rank.groups[action.stage] if rank.run.uses_fsdp else []
    flat = rank.gathered_bytes if rank.run.mesh.fsdp > 1 else lambda group: 0
    rank.gathering |= {group.name: flat(group) for group in groups}
    yield rank.instant("a stage is gathered")


def copy_out(rank: Rank, stage: int) -> Iterator[Instant]:
    """A stage is about to compute: if it was gathered as a whole, parameters leave the flat results group by group."""
    for group in rank.groups[stage]:
        if group.name in rank.gathering:
            rank.gathered[group.name] = rank.gathered_bytes(group)
            yield rank.instant("a stage is gathered")
            del rank.gathering[group.name]


def reshard_stage(rank: Rank, action: Action) -> Iterator[Instant]:
    """A stage's parameters are let go."""
    for group in rank.groups[action.stage]:
        rank.gathered.pop(group.name, None)
    yield rank.instant("a stage is let go")
