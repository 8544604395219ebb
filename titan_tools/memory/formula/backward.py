"""Instants of a backward: a microbatch goes back through a stage, block by block."""

from collections.abc import Iterator

from titan_tools.memory.formula.activations import BlockTensors, block_tensors, embedding_backward_bytes
from titan_tools.memory.formula.holdings import Group
from titan_tools.memory.formula.rank import Instant, Key, Rank
from titan_tools.memory.formula.reduction import gradients_made
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.schedules import Action


def backward(rank: Rank, action: Action) -> Iterator[Instant]:
    """Loss, output, blocks from the last to the first, embedding."""
    groups, key = rank.groups[action.stage], (action.stage, action.microbatch)
    if rank.is_last(action.stage):
        yield from _backward_of_loss(rank, key, groups)
    blocks = [(position, group) for position, group in enumerate(groups) if group.layer is not None]
    for position, group in reversed(blocks):
        which = "the last" if group is blocks[-1][1] else "the first" if group is blocks[0][1] else "a middle"
        yield from _backward_of_block(rank, key, group, which, _gathered_in_backward(rank, groups, position))
    rank.kept.pop(key)
    for group in groups:
        if "tok_embeddings" in group.name:
            yield from _backward_of_embedding(rank, group)
            rank.whole_gradients = 0
            yield from gradients_made(rank, group, "the embedding")
    rank.pending_reduce = 0  # FSDP2 waits for the last reduce-scatter at the end of each backward
    rank.all_reduced.clear()


def _backward_of_block(rank: Rank, key: Key, group: Group, which: str, gathered: int) -> Iterator[Instant]:
    sizes, layer, casts, is_kept = rank.sizes, group.layer, rank.casts(group), rank.is_kept_whole(group)
    when = f"backward of {which} block"
    one_by_one = max(group.full_sizes) * rank.run.gradient_bytes  # the most of a weight that is added up at once
    for moment in sizes.backward[layer]:
        yield rank.instant(
            when,
            activations=-moment.released,
            recompute=moment.recompute + (0 if is_kept else casts),
            gradients=min(moment.gradients, one_by_one) if rank.adds_up(group) else moment.gradients,
            all_gather=gathered,
            workspaces=moment.workspaces,
        )
    rank.kept[key] -= sizes.kept[layer] + (casts if is_kept else 0)
    made = 0 if rank.adds_up(group) else group.full_elements * rank.run.gradient_bytes
    if not rank.run.compiles_model:
        beside = casts + _beside_first_products(block_tensors(rank.run), rank.run)
        yield rank.instant(f"{when}'s first products", recompute=beside, gradients=made, all_gather=gathered)
    yield rank.instant(
        f"end of the {when}",
        recompute=2 * sizes.stream,  # its input and the gradient of that
        gradients=made,
        all_gather=gathered,
    )
    yield from gradients_made(rank, group, "a block")


def _beside_first_products(t: BlockTensors, run: RunShape) -> int:
    """What is there when the last of wq, wk and wv goes back: a block's input and gradient, its norm, their input.

    And the gradients that they give this input, two and their sum; a DTensor's is not made in place of one of them.
    """
    return 2 * t.stream + t.norm + (4 if run.mesh.tp > 1 else 3) * t.whole


def _backward_of_embedding(rank: Rank, group: Group) -> Iterator[Instant]:
    """Its gradient is made, and added to a tied output's.

    Under TP the gradient of all ranks' stream is gathered and copied, without the tokens of other ranks' rows; the copy
    is there while the kernel sorts tokens. Autograd adds into the output's gradient only if nothing else names that,
    and into no DTensor; without FSDP that is in the instants of gradients.
    """
    run = rank.run
    whole, own = run.mesh.tp * rank.sizes.stream, group.full_sizes[0] * run.gradient_bytes
    gathered = rank.gathered_bytes(group) if run.uses_fsdp and group.name not in rank.gathered else 0
    when = "backward of the embedding"
    if run.mesh.tp > 1:
        yield rank.instant(when, recompute=2 * whole, all_gather=gathered)
    inside = embedding_backward_bytes(run)
    yield rank.instant(when, gradients=own, recompute=whole, all_gather=gathered, workspaces=inside)
    is_added_in_place = run.loss_chunks and run.mesh.tp == 1
    if rank.whole_gradients and run.uses_fsdp and not is_added_in_place:
        yield rank.instant(when, gradients=2 * own, all_gather=gathered)


def _backward_of_loss(rank: Rank, key: Key, groups: list[Group]) -> Iterator[Instant]:
    """Cross entropy, then the output's products, whose gradients wait where the embedding shares the group."""
    run, ends = rank.run, groups[-1]
    gathered = _gathered_in_backward(rank, groups, len(groups) - 1)
    del rank.kept_loss[key]
    for when, size in rank.loss.backward:
        yield rank.instant(when, logits_and_loss=size, all_gather=gathered if run.loss_chunks else 0)
    rank.whole_gradients = ends.full_elements * run.gradient_bytes
    yield rank.instant("backward of the output", logits_and_loss=rank.loss.output_backward, all_gather=gathered)
    rank.kept[key] -= rank.sizes.final_norm + (rank.sizes.hidden if rank.loss.keeps_hidden else 0)
    if "tok_embeddings" not in ends.name:
        rank.whole_gradients = 0
        yield from gradients_made(rank, ends, "the output")
    elif run.uses_fsdp:
        rank.gathered[ends.name] = rank.gathered_bytes(ends)  # till the embedding's backward


def _gathered_in_backward(rank: Rank, groups: list[Group], position: int) -> int:
    """Besides what is kept: the group whose backward runs, and the flat all-gather result of the one before it.

    That only where there is something to gather: over one rank FSDP2 copies a group when its turn comes.
    """
    if not rank.run.uses_fsdp:
        return 0
    first = max(position - 1, 0) if rank.run.mesh.fsdp > 1 else position
    return sum(rank.gathered_bytes(g) for g in groups[first : position + 1] if g.name not in rank.gathered)
