"""Instants of a forward, and of the gathers of whole stages.

torch/distributed/pipelining/schedules.py (_PipelineScheduleRuntime), 2.11 to 2.13: a pipeline with several stages per
rank gathers a stage ahead of its actions and reshards it afterwards.
"""

from collections.abc import Iterator

from titan_tools.memory.formula.rank import FsdpGroup, Instant, Rank
from titan_tools.memory.schedules import Action


def gather_stage(rank: Rank, action: Action) -> Iterator[Instant]:
    """All of a stage is being gathered: one flat result per group. Over one rank there is nothing to gather."""
    for group in rank.groups[action.stage] if rank.run.uses_fsdp else []:
        rank.gathering[group.name] = rank.gathered_bytes(group) if rank.run.mesh.fsdp > 1 else 0
    yield rank.instant("a stage is gathered")


def _copy_out(rank: Rank, stage: int) -> Iterator[Instant]:
    """Before a stage computes that was gathered ahead: parameters are copied from the flat results, group by group."""
    for group in rank.groups[stage]:
        if group.name in rank.gathering:
            rank.gathered[group.name] = rank.gathered_bytes(group)
            yield rank.instant("a stage is gathered")
            del rank.gathering[group.name]


def reshard_stage(rank: Rank, action: Action) -> Iterator[Instant]:
    """A stage's gathered parameters are freed."""
    for group in rank.groups[action.stage]:
        rank.gathered.pop(group.name, None)
    yield rank.instant("a stage is resharded")


def forward(rank: Rank, action: Action) -> Iterator[Instant]:
    """A microbatch passes a stage: its activations stay; gathered parameters stay where FSDP keeps them."""
    run, groups = rank.run, rank.groups[action.stage]
    key = (action.stage, action.microbatch)
    yield from _copy_out(rank, action.stage)
    is_gathered_now = run.uses_fsdp and groups[-1].name not in rank.gathered
    if run.uses_fsdp and groups[0].name not in rank.gathered:
        num_copies = 2 if run.mesh.fsdp > 1 else 1  # the flat result, and the parameters copied out of it
        yield rank.instant("forward of the first module", all_gather=num_copies * rank.gathered_bytes(groups[0]))
    for group in groups if run.uses_fsdp else ():
        rank.gathered.pop(group.name, None)
        if group.is_kept:
            rank.gathered[group.name] = rank.gathered_bytes(group)
    rank.kept[key] = _kept_by_stage(rank, action.stage)
    if not rank.is_last(action.stage):
        yield rank.instant("end of forward")
        return
    rank.kept[key] += rank.sizes.hidden
    own = rank.sizes.stream if run.mesh.tp > 1 else 0  # the normalized stream before it was gathered
    output, flat = gathered_for_output(rank, groups, is_now=is_gathered_now)
    for when, size in rank.loss.logits:
        yield rank.instant(when, activations=own, logits_and_loss=size, all_gather=output + flat)
    gathered = output + flat if run.loss_chunks else flat
    for when, size in rank.loss.forward:
        yield rank.instant(when, activations=own, logits_and_loss=size, all_gather=gathered)
    rank.kept_loss[key] = rank.loss.kept
    rank.kept[key] -= 0 if rank.loss.keeps_hidden else rank.sizes.hidden


def gathered_for_output(rank: Rank, groups: list[FsdpGroup], *, is_now: bool) -> tuple[int, int]:
    """The output's parameters if they are not kept, and the flat result of a forward's last all-gather."""
    if not rank.run.uses_fsdp:
        return 0, 0
    output = 0 if groups[-1].is_kept else rank.gathered_bytes(groups[-1])
    if not is_now or rank.run.mesh.fsdp == 1:
        return output, 0
    is_early = "tok_embeddings" in groups[-1].name  # gathered with the embedding: the last all-gather is a block's
    return output, rank.gathered_bytes(groups[-2 if is_early else -1])


def _kept_by_stage(rank: Rank, stage: int) -> int:
    layers = [group.layer for group in rank.groups[stage] if group.layer is not None]
    stream = rank.sizes.stream
    kept = rank.sizes.rotary + sum(rank.sizes.kept[layer] for layer in layers)
    kept += rank.sizes.final_norm if "norm" in rank.run.stages[stage] else 0
    kept += sum(rank.casts(group) for group in rank.groups[stage] if rank.is_kept_whole(group))
    if stage > 0:
        kept -= stream  # the first block's input is the receive buffer
    if not rank.is_last(stage) and stage + 1 not in rank.groups:
        kept += stream  # the stage's output, kept until its backward
    return kept
