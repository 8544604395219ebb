"""Instants of gradients: added up over a pipeline's microbatches, and reduced to shards by FSDP2.

torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (foreach_reduce) and _fsdp_param_group.py, 2.11 to 2.13.
"""

from collections.abc import Iterator

from titan_tools.memory.formula.activations import embedding_backward_bytes
from titan_tools.memory.formula.holdings import Group
from titan_tools.memory.formula.rank import Instant, Rank
from titan_tools.memory.formula.run_shape import FP32
from titan_tools.memory.schedules import Action


def gradients_made(rank: Rank, group: Group, what: str) -> Iterator[Instant]:
    """A group's gradients are complete for this microbatch: reduced, or added up where that comes later."""
    run = rank.run
    if not run.uses_fsdp:
        made = _beside_the_embeddings(rank, group) if "tok_embeddings" in group.name else 0
        rank.shards[group.name] = group.full_elements * run.param_bytes
        yield rank.instant(f"gradients of {what}", gradients=made)
    elif run.uses_pipeline:
        is_embedding = group.name == "tok_embeddings" and group.name in rank.added_up
        made_within = embedding_backward_bytes(run) if is_embedding else 0  # a first sum comes after the kernel
        yield from add_up(rank, group, what, workspaces=made_within)
    else:
        yield from _reduce_scatter(rank, group, what, whole=rank.whole_bytes(group))


def add_up(rank: Rank, group: Group, what: str, **parts: int) -> Iterator[Instant]:
    """Torch's stages reduce once, after the last microbatch: till then whole fp32 gradients.

    A first microbatch's are cast one after another.
    """
    is_first = group.name not in rank.added_up
    rank.added_up[group.name] = group.full_elements * FP32
    rank.gathered[group.name] = rank.gathered_bytes(group)
    in_place = max(group.full_sizes) * FP32  # where autograd adds one after another
    whole = in_place if rank.run.compute_bytes == FP32 else rank.whole_bytes(group)
    made = _cast_in_turn(rank, group) if is_first else whole
    yield rank.instant(f"gradients of {what} added up", gradients=made, **parts)


def _cast_in_turn(rank: Rank, group: Group) -> int:
    """The most above all sums while gradients become sums one by one; in fp32 they are that already."""
    if rank.run.compute_bytes == FP32:
        return 0
    most = cast = 0
    for size in group.full_sizes:
        cast += size
        most = max(most, FP32 * cast + rank.run.compute_bytes * (group.full_elements - cast + size))
    return most - FP32 * group.full_elements


def reduce_stage(rank: Rank, action: Action) -> Iterator[Instant]:
    """The one reduction of a pipeline step: group by group, whole fp32 gradients become shards."""
    if not rank.run.uses_fsdp:
        return
    for group in rank.groups[action.stage]:
        whole = rank.added_up.pop(group.name)
        yield from _reduce_scatter(rank, group, "the pipeline step", whole=whole)
    rank.pending_reduce = 0
    rank.all_reduced.clear()


def _beside_the_embeddings(rank: Rank, group: Group) -> int:
    """Without FSDP: what the embedding's gradient is made from, by a cast or by the sum with a tied output's."""
    run = rank.run
    size = group.full_elements * run.param_bytes
    cast = group.full_elements * run.compute_bytes if run.casts_weights else 0
    return cast + size * (run.args.tied + rank.adds_up(group))


def _reduce_scatter(rank: Rank, group: Group, what: str, *, whole: int) -> Iterator[Instant]:
    """FSDP2 lets go of the previous input just before it makes this one's; then `whole` gradients, for the result.

    Over one rank there is no collective: the result is filled with a scaled copy of the input. The result becomes the
    gradient, unless that has another dtype or is there already; replicas (HSDP) hold it till backward ends even then.
    """
    run = rank.run
    rank.pending_reduce = group.full_elements * FP32
    rank.gathered.pop(group.name, None)
    yield rank.instant(f"gradients of {what} reduced", gradients=whole)
    scaled = rank.pending_reduce if run.mesh.fsdp == 1 else 0
    # foreach_reduce's loop over parameters, on several ranks, still names the last gradient. A norm's is too small to
    # be seen: a block's, and that of a tied output
    last = group.full_sizes[-1] if group.layer is None else 0
    named_last = whole // group.full_elements * last if run.mesh.fsdp > 1 else 0
    result = group.local_elements * FP32
    yield rank.instant(f"gradients of {what} reduced", gradients=result + named_last, reduce_scatter=scaled)
    cast = group.local_elements * run.param_bytes if run.param_bytes != FP32 else 0
    yield rank.instant(f"gradients of {what} reduced", gradients=result + named_last + cast)
    is_the_gradient = not cast and not rank.shards.get(group.name) and not run.is_offloaded
    if run.mesh.dp_replicate > 1 and not is_the_gradient:
        rank.all_reduced[group.name] = result
    rank.shards[group.name] = 0 if run.is_offloaded else group.local_elements * run.param_bytes
