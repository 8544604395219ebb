"""Bytes of float8 training with a scale per tensor (torchao 0.15): how blocks and the output projection differ.

torchao's products keep their inputs and weights in high precision and cast them again in backward. A product takes one
input in row-major and one in column-major order, so what two products read is cast, or copied, once for each.

Eager, a cast is four operations: to fp32, times its scale, clamped, to float8; at most two fp32 copies and the result
are held (CAST_BYTES). So the blocks keep what they keep in bf16, and their backward is fullest in the cast of the
feed-forward's product for w2's gradient.

Compiled, casts are fused with what writes or reads them. What only float8 products read is not kept, as the cast's
kernel can compute it (in bf16 it is kept: see compiled.py): neither norms' results nor the feed-forward's product.
Under TP what is gathered is float8 already, and kept.

Weights that FSDP gathers as float8 have a byte per element and need no cast.
"""

from dataclasses import replace

from titan_tools.memory.formula.activations import (
    Activations,
    BlockMoment,
    BlockTensors,
    activations_of,
    added_by_feed_forward,
    block_tensors,
    keeps_whole_block,
    kept_whole_block,
)
from titan_tools.memory.formula.compiled import Products, of_compiled_blocks
from titan_tools.memory.formula.run_shape import FP32, RunShape
from trainer.ranks.gpus import Gpu

CAST_BYTES = 2 * FP32 + 1  # per element, the most that an eager cast holds; one byte stays


def _gathers(run: RunShape) -> bool:
    return run.float8 is not None and run.float8.gathers


def eager_activations(run: RunShape) -> Activations:
    """What a microbatch takes, block by block, where blocks are not compiled."""
    layers = range(run.args.num_layers)
    return replace(activations_of(run), backward=tuple((_eager_cast(run, layer),) for layer in layers))


def _eager_cast(run: RunShape, layer: int) -> BlockMoment:
    """The product's cast, with its gradient, the incoming gradient cast in both orders, and cast w2."""
    t = block_tensors(run)
    sizes = _Sizes(run, t)
    bf16 = added_by_feed_forward(run, layer) - 2 * t.hidden
    return BlockMoment(
        recompute=bf16 + t.hidden + CAST_BYTES * sizes.hidden + 2 * sizes.stream + sizes.weight,
    )


class _Sizes:
    """Bytes in float8."""

    def __init__(self, run: RunShape, t: BlockTensors):
        self.hidden, self.stream, self.whole = (size // run.compute_bytes for size in (t.hidden, t.stream, t.whole))
        gathers = _gathers(run)
        self.weight = 0 if gathers else run.args.dim * run.args.ffn_hidden // run.mesh.tp  # one of the feed-forward's
        self.output_weight = 0 if gathers else run.args.dim * run.args.num_heads * run.args.head_dim // run.mesh.tp


def compiled_activations(run: RunShape, gpu: Gpu) -> Activations:
    """What a microbatch takes, block by block, where blocks are compiled."""
    return of_compiled_blocks(run, gpu, _products, _feed_forward)


def _products(run: RunShape, t: BlockTensors) -> Products:
    """An eager block keeps more than this; under CP both chunks' results are concatenated in float8.

    In attention's backward, as in compiled.py; what products read is held in float8, in both orders. For several
    samples under TP the gradients of w1's and w3's inputs are freed once their sum has been copied.
    """
    sizes, uses_tp = _Sizes(run, t), run.mesh.tp > 1
    joined = t.query // run.compute_bytes - t.query if run.mesh.cp > 1 else 0
    whole = kept_whole_block(run) - 2 * t.whole - 2 * t.hidden + (2 * sizes.whole if uses_tp else 0) + joined
    held = 2 * t.whole + t.stream + t.query + sizes.output_weight
    if not uses_tp:
        held += 2 * sizes.whole
    else:
        held += 2 * t.whole + t.stream + 4 * sizes.whole if run.microbatch_size == 1 else sizes.whole - t.whole
    return Products(whole, 2 * t.hidden + (sizes.whole if uses_tp else 0), held)


def _feed_forward(run: RunShape, t: BlockTensors, products: Products, layer: int) -> tuple[BlockMoment, ...]:
    """In the kernel for silu's backward.

    It reads the results of w1 and w3 and the product's gradient, and writes the product in column-major order and both
    gradients in both orders, in float8. Weights cast by a product in forward, the second norm's result and keys are
    held for backward. Under TP the cast incoming gradient is gathered, with checkpointing by operation also the second
    norm's result; a copy puts a gather of several samples in order. With full recomputation the first norm's has one
    each for wq, wk and wv, which are held too.
    """
    sizes = _Sizes(run, t)
    kernel = t.hidden + 5 * sizes.hidden
    if keeps_whole_block(run, layer):
        return (BlockMoment(recompute=t.stream + kernel + (sizes.whole if run.mesh.tp > 1 else 0)),)
    is_full, again = run.recompute.mode == "full", t.stream
    again += products.whole - t.stream + 2 * sizes.weight if is_full else t.hidden + sizes.weight
    if run.mesh.tp > 1:
        again += sizes.whole * (1 + (not is_full) if run.microbatch_size == 1 else 4 if is_full else 3)
    else:
        again += sizes.stream + (0 if is_full else t.stream) + (0 if _gathers(run) else t.key)
    if not is_full and run.mesh.cp > 1:
        again += t.query - t.parts
    return (BlockMoment(recompute=again + kernel),)


def output_cast_bytes(run: RunShape) -> int:
    """The most that casting the output's weight, which is not compiled, holds; 0 if it is not cast."""
    if run.float8 is None or run.float8.gathers or not run.float8.converts_output:
        return 0
    return CAST_BYTES * (run.args.vocab_size // run.mesh.tp) * run.args.dim


def gathered_bytes(run: RunShape, name: str, elements: int) -> int:
    """Of a group's parameters as FSDP gathers them: the weights of blocks' products, and of the output, in float8."""
    if run.float8 is None or not run.float8.gathers:
        return elements * run.compute_bytes
    if name.startswith("layers."):
        first = run.family.parameters(replace(run.args, num_layers=1))
        vectors = [p for p in first if p.layer is not None and not p.is_linear_weight]  # of norms, and biases
        others = sum(p.shape[0] // (1 if p.tp_dim is None else run.mesh.tp) for p in vectors)
    elif name.endswith("output") and run.float8.converts_output and not run.args.tied:
        weight = run.args.vocab_size // run.mesh.tp * run.args.dim
        others = elements - weight
    else:
        others = elements
    return elements - others + others * run.compute_bytes
