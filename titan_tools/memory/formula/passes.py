"""Instants of the forward and backward passes of a microbatch, and of FSDP's gathers and reductions of whole stages.

Forward (torch/distributed/pipelining/schedules.py, _PipelineScheduleRuntime, 2.11 to 2.15): a pipeline with several
stages per rank gathers a stage ahead of its actions and reshards it afterwards.

Split backward (torch/distributed/pipelining/_backward.py, 2.13: stage_backward_input, stage_backward_weight): the
first part computes the gradients of a stage's inputs; it keeps the graph, and the gradient at the output of each
operation that has a weight. The second goes through these operations from the first layer on; the rest of the graph is
kept until its end. The inputs of the first stage have no gradients: there the second part is a whole backward.

Reduction: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (foreach_reduce) and _fsdp_param_group.py, 2.11 to
2.15.
"""

from collections.abc import Iterator

from titan_tools.memory.formula.activations import BlockTensors, block_tensors, embedding_backward_bytes
from titan_tools.memory.formula.rank import FsdpGroup, Instant, Key, Rank
from titan_tools.memory.formula.run_shape import FP32, RunShape
from titan_tools.memory.schedules import LOOPS, Action


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


def receive_input(rank: Rank, action: Action) -> Iterator[Instant]:
    """A stage that keeps no buffers allocates one, unless the stage before is on the same rank."""
    if action.stage > 0 and action.stage - 1 not in rank.groups:
        rank.inputs[action.stage, action.microbatch] = rank.sizes.stream
    yield from ()


def receive_gradient(rank: Rank, action: Action) -> Iterator[Instant]:
    """The same for the gradient of its output."""
    if not rank.is_last(action.stage) and action.stage + 1 not in rank.groups:
        rank.output_gradients[action.stage, action.microbatch] = rank.sizes.stream
    yield from ()


def output_sent(rank: Rank, action: Action) -> Iterator[Instant]:
    """A stage that keeps no buffers frees what it sent: before its backward, in LOOPS."""
    if not rank.run.keeps_buffers and not rank.is_last(action.stage):
        rank.kept[action.stage, action.microbatch] -= rank.sizes.stream
    yield from ()


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
        kept -= stream  # the first block's input is the receive buffer, or the stage's before
    if not rank.is_last(stage) and (stage + 1 not in rank.groups or not rank.run.keeps_buffers):
        kept += stream  # the stage's output, kept until its backward
    return kept


def backward(rank: Rank, action: Action) -> Iterator[Instant]:
    """A whole backward of a microbatch: loss, output, blocks from the last to the first, embedding."""
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
    _forget_received(rank, key)
    _pass_gradient(rank, action)


def _forget_received(rank: Rank, key: Key) -> None:
    """After its backward. The losses, which are kept until the step ends, have graphs that refer to the last inputs."""
    if not rank.is_last(key[0]):
        rank.inputs.pop(key, None)
    rank.output_gradients.pop(key, None)


def _pass_gradient(rank: Rank, action: Action) -> None:
    """What a backward computes of its input: it is sent, or becomes the gradient of the output of this rank's stage.

    A planned schedule refers to what it sends until the step ends, of a split backward or from torch 2.15 on.
    """
    stage, microbatch = action.stage, action.microbatch
    if stage - 1 in rank.groups:
        rank.output_gradients[stage - 1, microbatch] = rank.sizes.stream
    elif stage > 0 and (action.kind == "I" or not rank.run.keeps_buffers and rank.run.schedule not in LOOPS):
        rank.of_inputs[stage, microbatch] = rank.sizes.stream


def _backward_of_block(rank: Rank, key: Key, group: FsdpGroup, which: str, gathered: int) -> Iterator[Instant]:
    sizes, layer, casts, is_kept = rank.sizes, group.layer, rank.casts(group), rank.is_kept_whole(group)
    assert layer is not None
    when = f"backward of {which} block"
    one_by_one = max(group.full_sizes) * rank.run.gradient_bytes  # the largest weight whose gradient is added at once
    for moment in sizes.backward[layer]:
        yield rank.instant(
            when,
            activations=-moment.released,
            recompute=moment.recompute + (0 if is_kept else casts),
            gradients=min(moment.gradients, one_by_one)
            if rank.adds_up(group)
            else rank.as_left(group, moment.gradients),
            all_gather=gathered,
            workspaces=moment.workspaces,
        )
    rank.kept[key] -= sizes.kept[layer] + (casts if is_kept else 0)
    made = 0 if rank.adds_up(group) else rank.as_left(group, group.full_elements * rank.run.gradient_bytes)
    if not rank.run.compiles_model:
        held = casts + _held_at_first_products(block_tensors(rank.run), rank.run)
        yield rank.instant(f"{when}'s first products", recompute=held, gradients=made, all_gather=gathered)
    yield rank.instant(
        f"end of the {when}",
        recompute=2 * sizes.stream,  # its input and the gradient of that
        gradients=made,
        all_gather=gathered,
    )
    yield from gradients_made(rank, group, "a block")


def _held_at_first_products(t: BlockTensors, run: RunShape) -> int:
    """What is held in the backward of the last of wq, wk and wv: a block's input and gradient, its norm, their input.

    And the gradients of that input: two and their sum; a DTensor's sum is not made in place.
    """
    return 2 * t.stream + t.norm + (4 if run.mesh.tp > 1 else 3) * t.whole


def _backward_of_embedding(rank: Rank, group: FsdpGroup) -> Iterator[Instant]:
    """Its gradient is computed, and added to a tied output's.

    Under TP the gradient of all ranks' stream is gathered and copied, without the tokens of other ranks' rows; the copy
    is held while the kernel sorts tokens. Autograd adds into the output's gradient only if nothing else refers to it,
    and not into a DTensor; without FSDP see gradients_made.
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


def _backward_of_loss(rank: Rank, key: Key, groups: list[FsdpGroup]) -> Iterator[Instant]:
    """Cross entropy, then the output's products, whose gradients wait if the embedding shares the group."""
    run, ends = rank.run, groups[-1]
    gathered = _gathered_in_backward(rank, groups, len(groups) - 1)
    del rank.kept_loss[key]
    for when, size in rank.loss.backward:
        yield rank.instant(when, logits_and_loss=size, all_gather=gathered if run.loss_chunks else 0)
    rank.whole_gradients = ends.full_elements * run.gradient_bytes
    if run.sums_at_once and run.uses_pipeline and run.uses_fsdp:
        rank.whole_gradients += 0 if rank.adds_up(ends) else ends.full_elements * FP32  # cast
    yield rank.instant("backward of the output", logits_and_loss=rank.loss.output_backward, all_gather=gathered)
    rank.kept[key] -= rank.sizes.final_norm + (rank.sizes.hidden if rank.loss.keeps_hidden else 0)
    if "tok_embeddings" not in ends.name:
        rank.whole_gradients = 0
        yield from gradients_made(rank, ends, "the output")
    elif run.uses_fsdp:
        rank.gathered[ends.name] = rank.gathered_bytes(ends)  # until the embedding's backward


def _gathered_in_backward(rank: Rank, groups: list[FsdpGroup], position: int) -> int:
    """Besides what is kept: the group whose backward runs, and the flat result of the next all-gather.

    The latter only over several ranks: over one rank FSDP2 copies a group just before its backward.
    """
    if not rank.run.uses_fsdp:
        return 0
    first = max(position - 1, 0) if rank.run.mesh.fsdp > 1 else position
    return sum(rank.gathered_bytes(g) for g in groups[first : position + 1] if g.name not in rank.gathered)


def backward_of_inputs(rank: Rank, action: Action) -> Iterator[Instant]:
    """Activations stay, with gradients of the products' results; torch refers to those of the inputs all step."""
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
            rank.waiting[key] -= t.stream  # the incoming gradient is the receive buffer
        made = t.stream + max(t.hidden, 2 * t.whole)
        yield rank.instant(f"backward of {which} block's inputs", recompute=made)
    if rank.is_last(action.stage):
        rank.kept_loss[key] = loss.kept_for_weights
    _pass_gradient(rank, action)
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
    if rank.run.sums_at_once and rank.run.uses_fsdp:
        rank.added_up |= {group.name: group.full_elements * FP32 for group in groups}
        made = 0
    scaled = rank.kept_loss.pop(key, 0)
    yield rank.instant(
        "backward of the last weights",
        activations=num_blocks * _left_by_weights(block_tensors(rank.run)),
        gradients=made,
        logits_and_loss=2 * scaled,
    )
    for group in groups:
        if rank.run.uses_fsdp:
            made -= 0 if rank.run.sums_at_once else rank.whole_bytes(group)
            yield from add_up(rank, group, "a stage", recompute=made)
        else:
            rank.shards[group.name] = group.full_elements * rank.run.param_bytes
    _forget_received(rank, key)


def _waiting(t: BlockTensors, run: RunShape) -> int:
    """Of a block: gradients of both norms' results, of those of wq, wk, wv, wo, w1, w3 and w2, and of the head norms'.

    Under TP those of wo and w2 are gathered; else they are those of the stream.
    """
    of_stream = 2 * (t.whole if run.mesh.tp > 1 else t.stream)
    of_heads = t.query + t.key if run.has_head_norms else 0
    return 2 * t.stream + t.query + 2 * t.key + of_heads + of_stream + 2 * t.hidden


def _left_by_weights(t: BlockTensors) -> int:
    """What a block keeps and no operation with a weight reads: attention's tensors, and the feed-forward's factors."""
    return 2 * t.query + 2 * t.key_gathered + t.logsumexp + t.masks + 3 * t.hidden


def gradients_made(rank: Rank, group: FsdpGroup, what: str) -> Iterator[Instant]:
    """A group's gradients are complete for this microbatch: they are reduced, or added up to be reduced later."""
    run = rank.run
    if not run.uses_fsdp:
        made = _sources_of_embedding(rank, group) if "tok_embeddings" in group.name else 0
        rank.shards[group.name] = group.full_elements * run.param_bytes
        yield rank.instant(f"gradients of {what}", gradients=made)
    elif run.uses_copies:
        yield from _cast_gradients(rank, group, what)
    elif run.uses_pipeline:
        is_embedding = group.name == "tok_embeddings" and group.name in rank.added_up
        made_within = embedding_backward_bytes(run) if is_embedding else 0  # the first addition comes after the kernel
        yield from add_up(rank, group, what, workspaces=made_within)
    else:
        yield from _reduce_scatter(rank, group, what, whole=rank.whole_bytes(group))


def add_up(rank: Rank, group: FsdpGroup, what: str, **parts: int) -> Iterator[Instant]:
    """Torch's stages reduce once, after the last microbatch: until then unsharded fp32 gradients.

    Those of the first microbatch are cast one after another: when all are there, or each when it is made.
    """
    is_first = group.name not in rank.added_up
    rank.added_up[group.name] = group.full_elements * FP32
    rank.gathered[group.name] = rank.gathered_bytes(group)
    in_place = max(group.full_sizes) * FP32  # autograd adds one after another
    whole = in_place if rank.run.compute_bytes == FP32 else rank.whole_bytes(group)
    made = _cast_in_turn(rank, group) if is_first else whole
    if rank.run.sums_at_once:
        made = max(group.full_sizes) * rank.run.compute_bytes
    yield rank.instant(f"gradients of {what} added up", gradients=made, **parts)


def _cast_in_turn(rank: Rank, group: FsdpGroup) -> int:
    """The most above all sums while gradients are cast to sums one by one; in fp32 they need no cast."""
    if rank.run.compute_bytes == FP32:
        return 0
    most = cast = 0
    for size in group.full_sizes:
        cast += size
        most = max(most, FP32 * cast + rank.run.compute_bytes * (group.full_elements - cast + size))
    return most - FP32 * group.full_elements


def reduce_stage(rank: Rank, action: Action) -> Iterator[Instant]:
    """The reduction of a pipeline step: group by group, unsharded fp32 gradients become shards."""
    if not rank.run.uses_fsdp:
        return
    for group in rank.groups[action.stage]:
        whole = rank.added_up.pop(group.name)
        yield from _reduce_scatter(rank, group, "the pipeline step", whole=whole)
    rank.pending_reduce = 0
    rank.all_reduced.clear()


def _cast_gradients(rank: Rank, group: FsdpGroup, what: str) -> Iterator[Instant]:
    """One rank in mixed precision: each gradient is cast when its copy of the weight has been freed, or added."""
    run, is_first = rank.run, group.name not in rank.shards
    made = 0 if rank.adds_up(group) else rank.whole_bytes(group)
    cast = max(group.full_sizes) * (run.param_bytes - run.compute_bytes) if is_first else 0
    yield rank.instant(f"gradients of {what} cast", gradients=made + cast)
    rank.gathered.pop(group.name)
    rank.shards[group.name] = group.full_elements * run.param_bytes


def _sources_of_embedding(rank: Rank, group: FsdpGroup) -> int:
    """Without FSDP: what the embedding's gradient is made from, by a cast or by the sum with a tied output's."""
    run = rank.run
    size = group.full_elements * run.param_bytes
    cast = group.full_elements * run.compute_bytes if run.casts_weights else 0
    return cast + size * (run.args.tied + rank.adds_up(group))


def _reduce_scatter(rank: Rank, group: FsdpGroup, what: str, *, whole: int) -> Iterator[Instant]:
    """FSDP2 frees the previous input just before it makes this one; then `whole` gradients, for the result.

    Over one shard there is no collective: the result is a copy of the input, with replicas a scaled one. The result
    becomes the gradient, unless that has another dtype or exists already; replicas (HSDP) hold it until backward ends
    even then.
    """
    run = rank.run
    rank.pending_reduce = group.full_elements * FP32
    rank.gathered.pop(group.name, None)
    yield rank.instant(f"gradients of {what} reduced", gradients=whole)
    scaled = rank.pending_reduce if run.mesh.fsdp == 1 and run.mesh.dp_replicate > 1 else 0
    # On several ranks foreach_reduce's loop over parameters still refers to the last gradient, before torch 2.15. That
    # of a norm is negligible: a block's, and that of a tied output, are not
    last = group.full_sizes[-1] if group.layer is None and not run.sums_at_once else 0
    named_last = whole // group.full_elements * last if run.mesh.fsdp > 1 else 0
    result = group.local_elements * FP32
    yield rank.instant(f"gradients of {what} reduced", gradients=result + named_last, reduce_scatter=scaled)
    cast = group.local_elements * run.param_bytes if run.param_bytes != FP32 else 0
    yield rank.instant(f"gradients of {what} reduced", gradients=result + named_last + cast)
    is_the_gradient = not cast and not rank.shards.get(group.name) and not run.is_offloaded
    if run.mesh.dp_replicate > 1 and not is_the_gradient:
        rank.all_reduced[group.name] = result
    rank.shards[group.name] = 0 if run.is_offloaded else group.local_elements * run.param_bytes
