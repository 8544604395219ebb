"""Bytes of activations: what a block keeps for backward in each checkpointing mode, and what its backward adds.

Counted per tensor of trainer/models/decoder.py (SwiGLU, grouped-query attention, flash attention) and of Qwen 3's
attention, which normalizes the heads of q and k: published formulas (arXiv 2205.05198 §4: 34·s·b·h) are for GPT with
dropout in fp16. A test compares with what torch keeps on a CPU.
"""

from dataclasses import dataclass, replace

from titan_tools.memory.constants import EMBEDDING_ROWS_PER_THREAD, EMBEDDING_UNSORTED_TOKENS
from titan_tools.memory.formula.run_shape import FP32, RunShape
from trainer.ranks.gpus import HOPPER, Gpu


@dataclass(frozen=True, slots=True)
class BlockMoment:
    """A local maximum in a block's backward, in bytes relative to what the block kept."""

    recompute: int  # recomputed activations, and gradients of activations
    gradients: int = 0  # of weights
    released: int = 0  # of what was kept
    workspaces: int = 0  # allocated by a kernel


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one microbatch on one rank."""

    stream: int
    rotary: int  # the rotary embedding's angles, made by each stage; in a pipeline every sample has its own
    kept: tuple[int, ...]  # by block, from its forward to its backward
    backward: tuple[tuple[BlockMoment, ...], ...]  # by block, in time order
    final_norm: int  # the last norm's input and what it keeps
    hidden: int  # the whole normalized stream, which the output projection reads


def activations_of(run: RunShape) -> Activations:
    """What a microbatch takes, block by block."""
    t, layers = block_tensors(run), range(run.args.num_layers)
    return Activations(
        stream=t.stream,
        rotary=run.num_tokens // (1 if run.uses_pipeline else run.microbatch_size) * run.args.head_dim * FP32,
        kept=tuple(kept_block(run, layer) for layer in layers),
        backward=tuple(moments(run, layer) for layer in layers),
        final_norm=t.stream + t.norm,
        hidden=t.whole,
    )


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """Bytes of the tensors of one block for one microbatch on one rank.

    Sequence parallelism shards the residual stream over TP between the products; their inputs are gathered, and their
    results are whole before they are reduced.
    """

    stream: int  # the residual stream, [B, L/tp, D]
    whole: int  # the same, gathered: the input of wq, wk, wv, w1, w3; and w2's result before it is reduced
    query: int  # also the attention's result
    key: int  # of this rank's sequence shard; the value has the same size
    key_gathered: int  # over context parallelism; else as `key`
    hidden: int  # w1's result; silu, w3's result and their product have the same size
    logsumexp: int  # fp32, per head and token
    norm: int  # what a norm keeps besides the stream that it reads: one fp32 number per token
    head_norms: int  # what the norms of q and k keep, the results of wq and wk included; 0 without such norms
    masks: int  # context parallelism on a CPU: of both chunks of a rank's queries, as floats
    scores: int  # of all queries and keys, where attention is plain products; else 0
    parts: int  # what op-level checkpointing keeps of attention in two parts, beyond their merged result; else 0


def block_tensors(run: RunShape) -> BlockTensors:
    """Sizes for one block of the run."""
    args, tokens, tp, element = run.args, run.num_tokens, run.mesh.tp, run.compute_bytes
    whole = tokens * args.dim * element
    query = tokens * args.num_heads * args.head_dim * element // tp
    key = tokens * args.num_kv_heads * args.head_dim * element // tp
    stream = whole // tp
    return BlockTensors(
        stream=stream,
        whole=whole,
        query=query,
        key=key,
        key_gathered=key * run.mesh.cp,
        hidden=tokens * args.ffn_hidden * element // tp,
        logsumexp=tokens * args.num_heads * FP32 // tp,
        norm=stream // element // args.dim * FP32,
        head_norms=query + key + (query + key) // element // args.head_dim * FP32 if run.has_head_norms else 0,
        masks=_mask_elements(run.seq_len, run.mesh.cp) * element if run.cpu_attention else 0,
        scores=tokens * args.num_heads // tp * run.seq_len * element if run.keeps_scores else 0,
        parts=query + tokens * args.num_heads * FP32 // tp if run.splits_keys else 0,
    )


def _mask_elements(seq_len: int, cp: int) -> int:
    """Head and tail, seq_len/2cp queries each, attend to 2·cp + 1 chunks of keys: trainer/parallel/context.py."""
    chunk = seq_len // (2 * cp)
    return (2 * cp + 1) * chunk * chunk if cp > 1 else 0


def kept_whole_block(run: RunShape) -> int:
    """What a block without checkpointing keeps from forward to backward."""
    t = block_tensors(run)
    attention = t.stream + t.norm + t.whole + t.head_norms + t.query
    # Plain products read keys and values repeated for each query head, and keep softmax's result.
    attention += 3 * t.query + t.scores if t.scores else 2 * t.key_gathered + t.query + t.logsumexp
    if run.mesh.cp > 1:
        attention += t.query + t.masks  # the two chunks' results are joined into a copy
    feed_forward = t.stream + t.norm + t.whole + 4 * t.hidden
    return attention + feed_forward


def keeps_whole_block(run: RunShape, layer: int) -> bool:
    """Whether nothing of block `layer` is recomputed."""
    return run.recompute.mode == "none" or (layer + 1) % run.recompute.every > 0


def kept_block(run: RunShape, layer: int) -> int:
    """What block `layer` keeps from forward to backward in the run's mode; every n-th one is checkpointed."""
    t = block_tensors(run)
    if keeps_whole_block(run, layer):
        return kept_whole_block(run)
    if run.recompute.mode == "full":
        return t.stream
    kept = _reused_by_recompute(t) + t.parts + t.whole  # w2's result, which backward never reads
    return kept + (2 * t.stream if run.mesh.tp > 1 else 0)  # both reduce-scatters


def _reused_by_recompute(t: BlockTensors) -> int:
    """What op-level checkpointing keeps and recomputation reads: the block's input, and the results of wq, wv and w1
    (every second product) and of attention. All-gathers run again.
    """
    return t.stream + t.query + t.key + t.query + t.hidden + (0 if t.scores else t.logsumexp)


def moments(run: RunShape, layer: int) -> tuple[BlockMoment, ...]:
    """At TP's collectives in a block's backward; and in the feed-forward, where w2's gradient is the only one."""
    first_gradient = run.args.dim * run.args.ffn_hidden // run.mesh.tp * run.gradient_bytes
    return (
        BlockMoment(recompute=added_by_collectives(run, layer)),
        BlockMoment(recompute=added_by_feed_forward(run, layer), gradients=first_gradient),
    )


def added_by_feed_forward(run: RunShape, layer: int) -> int:
    """What the backward of a block adds during the feed-forward's backward.

    The rest of a checkpointed block, recomputed; the incoming gradient; those of silu and of w3's result (their
    product's replaces the product). Under TP the gathered gradient is freed by then.
    """
    t = block_tensors(run)
    made = t.stream + max(2 * t.hidden, t.whole + t.hidden if run.mesh.tp > 1 else 0)
    if run.recompute.mode != "op":
        return kept_whole_block(run) - kept_block(run, layer) + made
    rest = kept_whole_block(run) - _reused_by_recompute(t) - _freed_by_recompute(t, run)
    return rest + t.whole + 2 * t.hidden


def added_by_collectives(run: RunShape, layer: int) -> int:
    """What the backward of a block adds at TP's collectives, before any weight's gradient; 0 without TP.

    A copy puts a gather's parts in sequence order, and splits a sum into its ranks' parts. The gradient of w2's result
    is gathered first, since it triggers the recomputation, which reduces the results of wo and w2 again, or with
    checkpointing by operation only copies them for that. Callers still hold a norm's result, and wo's.
    """
    if run.mesh.tp == 1:
        return 0
    t = block_tensors(run)
    incoming = t.stream + t.whole  # the gradient, and the same gathered
    if run.recompute.mode == "op":
        again = kept_whole_block(run) - _reused_by_recompute(t) - t.parts
        return incoming + again + (0 if run.recompute.stops_early else t.whole)
    rest = kept_whole_block(run) - kept_block(run, layer)
    if rest == 0 or run.recompute.stops_early:
        return rest + incoming + t.whole
    return rest + incoming + 2 * t.whole + 2 * t.stream


def embedding_backward_bytes(run: RunShape) -> int:
    """In the embedding's backward kernel on a GPU: sorted tokens with indices of eight bytes; sums of rows in fp32."""
    tokens = run.num_tokens
    if tokens <= EMBEDDING_UNSORTED_TOKENS:
        return 0
    rows = min(tokens, run.args.vocab_size // run.mesh.tp)
    sums = rows + tokens // EMBEDDING_ROWS_PER_THREAD
    return 8 * (3 * tokens + 2 * rows + sums) + sums * run.args.dim * FP32


def _freed_by_recompute(t: BlockTensors, run: RunShape) -> int:
    """What was kept and is freed by then: w2's result, or under TP both sums, unless recomputation stops before them;
    and parts of attention's result.

    Under TP the reduce-scatter's copy of w2's result takes its place. Its first sum is freed in any case.
    """
    if run.mesh.tp > 1:
        return t.parts + (t.stream if run.recompute.stops_early else 2 * t.stream)
    return t.parts + (0 if run.recompute.stops_early else t.whole)


def eager_activations(run: RunShape, gpu: Gpu) -> Activations:
    """What a microbatch takes, block by block, where blocks are not compiled."""
    sizes = activations_of(run)
    backward = ((*moments, _eager_backward(run, layer, gpu)) for layer, moments in enumerate(sizes.backward))
    return replace(sizes, backward=tuple(backward))


def _eager_backward(run: RunShape, layer: int, gpu: Gpu) -> BlockMoment:
    """In attention's backward, after the gradients of the feed-forward and of wo, when their tensors are freed.

    What attention keeps, the gradients of its result and of its inputs, and the residual stream's. Plain products have
    freed the values by then; the scores' gradient exists before and after softmax.
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
    """In attention's backward kernel: queries' gradients in fp32 and a row sum; under CP of one chunk's queries.

    cuDNN's on Hopper, which groups heads itself; else flash attention's, which makes keys' and values' gradients per
    query head (csrc/flash_attn/flash_api.cpp, mha_bwd) and pads queries to 128, heads to 32. In fp32 the
    memory-efficient one (cuda/mem_eff_attention/kernel_backward.h) accumulates in the results.
    """
    args, cp = run.args, run.mesh.cp
    if run.compute_bytes == FP32 or run.cpu_attention:
        return 0
    heads, dim, length = args.num_heads // run.mesh.tp, args.head_dim, run.seq_len // cp
    chunk = length // 2 if cp > 1 else length
    if gpu.sm == HOPPER:
        return run.microbatch_size * chunk * heads * FP32 * (dim + 1)
    rows = run.microbatch_size * heads * -(-chunk // 128) * 128
    grouped = 2 * t.key_gathered * (args.num_heads // args.num_kv_heads) if args.num_heads != args.num_kv_heads else 0
    return rows * FP32 * (-(-dim // 32) * 32 + 1) + grouped
