"""Bytes of a block that Inductor has compiled: what it keeps for backward, and its backward's maxima.

Derived from what the compiler does (torch 2.11 to 2.13), checked against the traced plan on whole models.

Kept: AOTAutograd's min-cut keeps what is expensive to recompute, and what a product in backward reads, since only
pointwise operations are fused into their readers (torch/_functorch/partitioners.py: operations that are never
recomputed, and ban_recompute_materialized_backward). That is the inputs of products; those results of products, of
attention and of collectives that pointwise backwards need; a number per row of a norm. So of the eager block's tensors
only silu(w1) is not kept: the kernel that reads it computes it from w1's result. Under `op`, w2's result, which eager
mode keeps and no backward reads, is left out.

Backward: fused operations have no tensors in between. There are two maxima: the kernel for the backward of silu and its
product; and attention's backward, while the feed-forward's results are still held. Inductor reuses a buffer for the
next one of its size without freeing it, so dead buffers remain for the gradients of wq's, wk's and wv's inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from trainer.ranks.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Products:
    """Bytes of a compiled block that depend on the dtype of its products."""

    whole: int  # what a block without recomputation keeps
    feed_forward: int  # of `whole`, what is freed before attention's backward
    held: int  # made before attention's backward and held in it


FeedForward = Callable[[RunShape, BlockTensors, Products, int], tuple[BlockMoment, ...]]  # the int: number of the block


def compiled_activations(run: RunShape, gpu: Gpu) -> Activations:
    """What a microbatch takes, block by block, where blocks are compiled and products are not in float8."""
    return of_compiled_blocks(run, gpu, _products, _feed_forward)


def of_compiled_blocks(
    run: RunShape, gpu: Gpu, products: Callable[[RunShape, BlockTensors], Products], feed_forward: FeedForward
) -> Activations:
    """The same, given what depends on the dtype of products, and the highest points of the feed-forward's backward."""
    t = block_tensors(run)
    of_dtype, layers = products(run, t), range(run.args.num_layers)
    return replace(
        activations_of(run),
        kept=tuple(_kept_block(run, t, of_dtype, layer) for layer in layers),
        backward=tuple(
            (*feed_forward(run, t, of_dtype, layer), _attention(run, t, of_dtype, layer, gpu)) for layer in layers
        ),
    )


def _kept_block(run: RunShape, t: BlockTensors, products: Products, layer: int) -> int:
    """What block `layer` keeps from forward to backward.

    With checkpointing by operation: the input; the results of wq, wv, w1 and attention; under TP, where sums are kept,
    that of wo after its sum.
    """
    if keeps_whole_block(run, layer):
        return products.whole
    if run.recompute.mode == "full":
        return t.stream
    summed = t.stream if run.mesh.tp > 1 else 0
    return t.stream + t.query + t.key + t.query + t.logsumexp + t.parts + t.hidden + summed


def _products(run: RunShape, t: BlockTensors) -> Products:
    """In attention's backward are held: gradients of the inputs of w1 and w3, separately; of the first sum; of
    attention's result.

    Under TP also the gathered gradient of wo's result, and the sum of the first two before and after its reduction, or
    for several samples a copy in rank order, which replaces one of them and is freed.
    """
    held = 2 * t.whole + t.stream + t.query
    if run.mesh.tp > 1:
        held += 2 * t.whole + t.stream if run.microbatch_size == 1 else t.whole
    return Products(kept_whole_block(run) - t.hidden, 3 * t.hidden + t.whole, held)


def _feed_forward(run: RunShape, t: BlockTensors, products: Products, layer: int) -> tuple[BlockMoment, ...]:
    """In silu's kernel, and after w2's gradient.

    Without recomputation: w2's gradient comes first and frees the product; the kernel reads the results of w1 and w3
    and the product's gradient, and writes one of two gradients in place of one of them. With it, the kernel also writes
    the product itself, which w2's gradient reads afterwards: three read, three written. Under TP the incoming gradient
    is gathered before that; the gather of more than one sample is put in sequence order by a copy.
    """
    gradient = run.args.dim * run.args.ffn_hidden // run.mesh.tp * run.gradient_bytes  # of w2
    gathered = t.whole if run.mesh.tp > 1 else 0
    incoming = t.stream + gathered
    if keeps_whole_block(run, layer):
        return (
            BlockMoment(recompute=incoming + (gathered if run.microbatch_size > 1 else 0)),
            BlockMoment(recompute=incoming, gradients=gradient),
            BlockMoment(released=t.hidden, recompute=t.stream + 2 * t.hidden, gradients=gradient),
        )
    if run.recompute.mode == "full":
        again = products.whole - t.stream + incoming
    else:  # w3's result and the product; the second norm's, and without TP its input
        again = incoming + 2 * t.hidden + t.whole + (0 if run.mesh.tp > 1 else t.stream)
        again += t.query - t.parts if run.mesh.cp > 1 else 0  # both chunks' results, concatenated
    return (
        BlockMoment(recompute=again + 3 * t.hidden),
        BlockMoment(recompute=again, gradients=gradient),
    )


def _attention(run: RunShape, t: BlockTensors, products: Products, layer: int, gpu: Gpu) -> BlockMoment:
    """In attention's backward: what the block keeps, without the feed-forward's, and gradients, also of three weights.

    With CP attention's backward runs chunk by chunk: half the queries, and all keys that the last chunk attends to.
    """
    kept, own = _kept_block(run, t, products, layer), products.whole - products.feed_forward
    made = products.held + t.query // (2 if run.mesh.cp > 1 else 1) + 2 * t.key_gathered
    return BlockMoment(
        released=max(kept - own, 0),
        recompute=made + max(own - kept, 0),
        gradients=3 * run.args.dim * run.args.ffn_hidden // run.mesh.tp * run.gradient_bytes,
        workspaces=attention_backward_bytes(run, t, gpu),
    )
