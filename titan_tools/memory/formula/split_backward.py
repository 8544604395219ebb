"""Instants of a backward in two parts: gradients of a stage's inputs first, of its weights later.

torch/distributed/pipelining/_backward.py (stage_backward_input, stage_backward_weight), 2.13: the first part goes
through the whole graph and keeps it, and what arrives at the output of each operation that has a weight. The second
goes through these operations one after another, from the first layer on; the rest of the graph, which the last of them
leads to, stays until its end. A first stage's inputs have no gradients: there the second part is a whole backward.
"""

from collections.abc import Iterator

from titan_tools.memory.formula.activations import BlockTensors, block_tensors
from titan_tools.memory.formula.backward import backward
from titan_tools.memory.formula.rank import Instant, Rank
from titan_tools.memory.formula.reduction import add_up
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.schedules import Action


def backward_of_inputs(rank: Rank, action: Action) -> Iterator[Instant]:
    """Activations stay, and gradients of what weights made join them; torch names those of the inputs all step."""
    if action.stage == 0:
        return
    groups, key, loss = rank.groups[action.stage], (action.stage, action.microbatch), rank.loss
    t = block_tensors(rank.run)
    rank.waiting[key] = 0
    if rank.is_last(action.stage):
        del rank.kept_loss[key]
        for when, size in loss.backward:
            yield rank.instant(when, logits_and_loss=size)
        rank.kept_loss[key] = loss.kept_for_weights + loss.kept_within
        rank.waiting[key] += t.stream  # of the last norm's result
    blocks = [group for group in groups if group.layer is not None]
    for group in reversed(blocks):
        which = "the last" if group is blocks[-1] else "the first" if group is blocks[0] else "a middle"
        rank.waiting[key] += _waiting(t, rank.run)
        if group is blocks[-1] and not rank.is_last(action.stage) and rank.run.mesh.tp == 1:
            rank.waiting[key] -= t.stream  # what came in lies in the buffer that it was received into
        made = t.stream + max(t.hidden, 2 * t.whole)
        yield rank.instant(f"backward of {which} block's inputs", recompute=made)
    if rank.is_last(action.stage):
        rank.kept_loss[key] = loss.kept_for_weights
    rank.of_inputs[key] = 0 if action.stage - 1 in rank.groups else t.stream
    yield rank.instant("end of the backward of inputs")


def backward_of_weights(rank: Rank, action: Action) -> Iterator[Instant]:
    """Gradients of all weights of a stage, in the compute dtype, before FSDP adds them up in fp32."""
    if action.stage == 0:
        yield from backward(rank, action)
        return
    groups, key = rank.groups[action.stage], (action.stage, action.microbatch)
    yield rank.instant("backward of the first weights", gradients=max(groups[0].full_sizes) * rank.run.gradient_bytes)
    num_blocks = sum(group.layer is not None for group in groups)
    del rank.kept[key], rank.waiting[key]
    made = sum(group.full_elements for group in groups) * rank.run.gradient_bytes if rank.run.uses_fsdp else 0
    scaled = rank.kept_loss.pop(key, 0)
    yield rank.instant(
        "backward of the last weights",
        activations=num_blocks * _left_by_weights(block_tensors(rank.run)),
        gradients=made,
        logits_and_loss=2 * scaled,
    )
    for group in groups:
        if rank.run.uses_fsdp:
            made -= rank.whole_bytes(group)
            yield from add_up(rank, group, "a stage", recompute=made)
        else:
            rank.shards[group.name] = group.full_elements * rank.run.param_bytes


def _waiting(t: BlockTensors, run: RunShape) -> int:
    """Of a block: gradients of both norms' results, of wq, wk, wv, wo, w1, w3 and w2, and of the heads' norms.

    Under TP those of wo and w2 are gathered; else they are those of the stream.
    """
    of_stream = 2 * (t.whole if run.mesh.tp > 1 else t.stream)
    of_heads = t.query + t.key if run.has_head_norms else 0
    return 2 * t.stream + t.query + 2 * t.key + of_heads + of_stream + 2 * t.hidden


def _left_by_weights(t: BlockTensors) -> int:
    """What a block keeps that no operation with a weight reads: attention's, and the feed-forward's factors."""
    return 2 * t.query + 2 * t.key_gathered + t.logsumexp + t.masks + 3 * t.hidden
