"""What attention's backward takes inside of its kernel on a GPU."""

from titan_tools.memory.constants import HOPPER, Gpu
from titan_tools.memory.formula.activations import FP32, BlockTensors
from titan_tools.memory.formula.run_shape import RunShape


def attention_backward_bytes(run: RunShape, t: BlockTensors, gpu: Gpu) -> int:
    """Inside of attention's backward: queries' gradients in fp32 and a row sum.

    cuDNN's on Hopper, which groups heads by itself; else, and always under CP, flash attention's, which makes keys' and
    values' gradients per query head (csrc/flash_attn/flash_api.cpp, mha_bwd) and takes queries by 128, heads by 32.
    """
    args, cp = run.args, run.mesh.cp
    heads, dim, length = args.num_heads // run.mesh.tp, args.head_dim, run.seq_len // cp
    if cp == 1 and gpu.sm == HOPPER:
        return run.num_tokens * heads * FP32 * (dim + 1)
    chunk = length // 2 if cp > 1 else length
    rows = run.microbatch_size * heads * -(-chunk // 128) * 128
    grouped = 2 * t.key_gathered * (args.num_heads // args.num_kv_heads) if args.num_heads != args.num_kv_heads else 0
    return rows * FP32 * (-(-dim // 32) * 32 + 1) + grouped
