"""What attention's backward takes on a GPU, in its kernel and around it."""

from dataclasses import replace

from titan_tools.memory.constants import HOPPER, Gpu
from titan_tools.memory.formula.activations import (
    Activations,
    BlockMoment,
    BlockTensors,
    activations_of,
    block_tensors,
    kept_block,
)
from titan_tools.memory.formula.run_shape import FP32, RunShape


def eager_activations(run: RunShape, gpu: Gpu) -> Activations:
    """What the microbatches of a run take, block by block, where blocks are not compiled."""
    sizes = activations_of(run)
    backward = ((*moments, _eager_backward(run, layer, gpu)) for layer, moments in enumerate(sizes.backward))
    return replace(sizes, backward=tuple(backward))


def _eager_backward(run: RunShape, layer: int, gpu: Gpu) -> BlockMoment:
    """In attention's backward, when the feed-forward's and wo's gradients are made and its tensors are gone.

    What attention keeps, the gradients of its result and of what it reads, and the residual stream's. Plain products
    have let go of the values by then; the scores' gradient is there before and after softmax.
    """
    args, t = run.args, block_tensors(run)
    norm = t.stream + t.norm + t.whole + t.head_norms
    if t.scores:
        inside = 3 * t.query + 3 * t.scores
    else:
        kept = 2 * t.query + 2 * t.key_gathered + t.logsumexp + t.masks
        inside = kept + 2 * t.query + 2 * t.key_gathered
    weights = args.dim * (3 * args.ffn_hidden + args.num_heads * args.head_dim) // run.mesh.tp
    return BlockMoment(
        released=kept_block(run, layer),
        recompute=norm + inside + t.stream,
        gradients=weights * run.gradient_bytes,
        workspaces=attention_backward_bytes(run, t, gpu),
    )


def attention_backward_bytes(run: RunShape, t: BlockTensors, gpu: Gpu) -> int:
    """Inside of attention's backward: queries' gradients in fp32 and a row sum.

    cuDNN's on Hopper, which groups heads by itself; else, and always under CP, flash attention's, which makes keys' and
    values' gradients per query head (csrc/flash_attn/flash_api.cpp, mha_bwd) and takes queries by 128, heads by 32.
    In fp32 the memory-efficient one (cuda/mem_eff_attention/kernel_backward.h) adds up in the results themselves.
    """
    args, cp = run.args, run.mesh.cp
    if run.compute_bytes == FP32 or not run.traits.attention_buffers:
        return 0
    heads, dim, length = args.num_heads // run.mesh.tp, args.head_dim, run.seq_len // cp
    if cp == 1 and gpu.sm == HOPPER:
        return run.num_tokens * heads * FP32 * (dim + 1)
    chunk = length // 2 if cp > 1 else length
    rows = run.microbatch_size * heads * -(-chunk // 128) * 128
    grouped = 2 * t.key_gathered * (args.num_heads // args.num_kv_heads) if args.num_heads != args.num_kv_heads else 0
    return rows * FP32 * (-(-dim // 32) * 32 + 1) + grouped
