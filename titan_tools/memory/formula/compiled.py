"""Bytes of a block that torch.compile has compiled with Inductor: what it keeps for backward, and its backward's peaks.

Derived from what the compiler does (torch 2.11 to 2.13), checked against the traced plan on whole models.

Kept. AOTAutograd's min-cut keeps what is dear to compute again, or what a product of backward reads as it is, for only
pointwise operations are fused into what reads them (torch/_functorch/partitioners.py: what is never computed again, and
ban_recompute_materialized_backward): the inputs of products; those results of products, of attention and of collectives
that pointwise backwards need; a number per row of a norm. So of the eager block's tensors only silu(w1) is not kept: it
comes from w1's result inside of the kernel that reads it. Under `op` what eager keeps in vain, w2's result, is left
out, for no backward reads it, and of keys and values before and after CP's gather only the gathered ones stay.

Backward. What is fused has no tensors between. The two points at which most is there: the kernel that goes back through
silu and its product; and attention's backward, while the feed-forward's results wait. Inductor hands a buffer on to the
next one of its size without giving it back, so what is dead waits for the gradients of wq's, wk's and wv's inputs.
"""

from collections.abc import Callable
from dataclasses import replace

from titan_tools.memory.constants import Gpu
from titan_tools.memory.formula.activations import (
    Activations,
    BlockMoment,
    BlockTensors,
    activations_of,
    attention_backward_bytes,
    block_tensors,
    keeps_whole_block,
    kept_whole_block,
)
from titan_tools.memory.formula.run_shape import RunShape


def compiled_activations(run: RunShape, gpu: Gpu) -> Activations:
    """What the microbatches of a run take, block by block, where blocks are compiled."""
    return of_compiled_blocks(run, gpu, kept_block, moments)


def of_compiled_blocks(
    run: RunShape,
    gpu: Gpu,
    kept_block: Callable[[RunShape, int], int],
    moments: Callable[[RunShape, int, Gpu], tuple[BlockMoment, ...]],
) -> Activations:
    """By what a block keeps and its backward's moments. Compiled norms, however written, keep what fused ones do."""
    layers, blocks = range(run.args.num_layers), replace(run, traits=replace(run.traits, norm="fused"))
    return replace(
        activations_of(run),
        kept=tuple(kept_block(blocks, layer) for layer in layers),
        backward=tuple(moments(blocks, layer, gpu) for layer in layers),
    )


def kept_block(run: RunShape, layer: int) -> int:
    """What block `layer` keeps from forward to backward."""
    t = block_tensors(run)
    if keeps_whole_block(run, layer):
        return _whole(run, t)
    if run.recompute.mode == "full":
        return t.stream
    return _kept_by_operation(run, t)


def _whole(run: RunShape, t: BlockTensors) -> int:
    return kept_whole_block(run) - t.hidden


def _kept_by_operation(run: RunShape, t: BlockTensors) -> int:
    """The input; the results of wq, wv (gathered under CP, then with the keys), w1 and attention; under TP, where
    collectives are kept, both gathered inputs of products, and wo's result after its sum.
    """
    keys = t.key if run.mesh.cp == 1 else 2 * t.key_gathered
    moved = 2 * t.whole + t.stream if run.mesh.tp > 1 else 0
    return t.stream + t.query + keys + t.query + t.logsumexp + t.hidden + moved


def moments(run: RunShape, layer: int, gpu: Gpu) -> tuple[BlockMoment, ...]:
    """The highest points of block `layer`'s backward."""
    t = block_tensors(run)
    return (*_feed_forward(run, t, layer), _attention(run, t, layer, gpu))


def _feed_forward(run: RunShape, t: BlockTensors, layer: int) -> tuple[BlockMoment, ...]:
    """In silu's kernel, and once w2's gradient has been made.

    Nothing computed again: w2's gradient comes first and lets go of the product; the kernel reads the results of w1 and
    w3 and the product's gradient, and writes one of two gradients in the place of one of them. Else the kernel also
    writes the product itself, which w2's gradient reads afterwards: three read, three written. Under TP the gradient
    that came in is gathered before all that; more than one sample's gather is put in sequence order by a copy.
    """
    gradient = run.args.dim * run.args.ffn_hidden // run.mesh.tp * run.gradient_bytes  # of w2
    gathered = t.whole if run.mesh.tp > 1 else 0
    came_in = t.stream + gathered
    if keeps_whole_block(run, layer):
        return (
            BlockMoment(recompute=came_in + (gathered if run.microbatch_size > 1 else 0)),
            BlockMoment(recompute=came_in, gradients=gradient),
            BlockMoment(released=t.hidden, recompute=t.stream + 2 * t.hidden, gradients=gradient),
        )
    if run.recompute.mode == "full":
        again = _whole(run, t) - t.stream + came_in
    else:  # w3's result and the product; the second norm's, and what it reads; under TP, which kept those, keys turned
        again = came_in + 2 * t.hidden + (t.key if run.mesh.tp > 1 else t.whole + t.stream)
        again += t.query if run.mesh.cp > 1 else 0  # both chunks' results joined
    return (
        BlockMoment(recompute=again + 3 * t.hidden),
        BlockMoment(recompute=again, gradients=gradient),
    )


def _attention(run: RunShape, t: BlockTensors, layer: int, gpu: Gpu) -> BlockMoment:
    """In attention's backward: what the block keeps but the feed-forward's, and gradients, three matrices' included.

    Those of the inputs of w1 and w3, apart; of the first sum; of attention's result; of what attention reads. Under TP
    also the gathered gradient of wo's result, and the sum of the first two before and after its reduction, or of
    several samples a copy in rank order, which takes the place of one of them and is let go of. With CP attention goes
    back chunk by chunk: half the queries, and all keys that the last chunk sees.
    """
    kept, tp = kept_block(run, layer), run.mesh.tp
    own = _whole(run, t) - 3 * t.hidden - t.whole
    made = 2 * t.whole + t.stream + t.query
    if tp > 1:
        made += 2 * t.whole + t.stream if run.microbatch_size == 1 else t.whole
    made += t.query // (2 if run.mesh.cp > 1 else 1) + 2 * t.key_gathered
    return BlockMoment(
        released=max(kept - own, 0),
        recompute=made + max(own - kept, 0),
        gradients=3 * run.args.dim * run.args.ffn_hidden // tp * run.gradient_bytes,
        workspaces=attention_backward_bytes(run, t, gpu),
    )
