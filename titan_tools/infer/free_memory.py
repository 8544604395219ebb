"""How many sequences at a time a GPU's free memory holds, once the model is loaded."""

import torch
import torch.distributed as dist

from converters.families.base import ModelArgs
from titan_tools.console import count, note
from titan_tools.infer.decoding.cache import copies_heads
from titan_tools.infer.decoding.engine import PREFILL_TOKENS
from titan_tools.infer.model.load import SlicedModel
from titan_tools.infer.ranks.group import Ranks

GIB = 1024**3
_OTHER_BYTES = GIB  # CUDA graphs, workspaces of matrix products, NCCL's buffers, and gaps between blocks
_BYTES_PER_LOGIT = 32  # in fp32, with all that choosing a token makes of it: sorted, their ids, probabilities


def rows_that_fit(model: SlicedModel, args: ModelArgs, ranks: Ranks, *, rows: int, room: int) -> int:
    """`rows`, or as many as each rank's GPU has memory for, at least one; the first rank says so where these are fewer.

    `room`: tokens of the longest sequence. On a CPU the cache takes memory only as tokens come, so all of them stay.
    Ranks are compared: each must call this.
    """
    if (free := free_bytes(model.device)) is None:
        return rows
    bytes_per_row = room * model.bytes_per_cached_token + args.vocab_size * _BYTES_PER_LOGIT
    fitting = (free - _pass_bytes(model, args, tp=ranks.tp, room=room) - _OTHER_BYTES) // bytes_per_row
    fitting = max(1, min(rows, _least(fitting, ranks)))
    if fitting < rows and ranks.is_first:
        told = f"{bytes_per_row / GIB:.2f} GiB for each, and {free / GIB:.2f} GiB of the GPU's memory are free"
        note(f"{count(fitting, 'sequence')} at a time in place of {rows}: up to {told}")
    return fitting


def free_bytes(device: torch.device) -> int | None:
    """What a GPU still has for tensors, None for a CPU."""
    if device.type != "cuda":
        return None
    kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept_by_torch


def _pass_bytes(model: SlicedModel, args: ModelArgs, *, tp: int, room: int) -> int:
    """About what a pass over a prompt holds: of each token some hidden states and those of a feed-forward layer, and of
    the longest sequence one layer's keys and values for each query head, where those are copied."""
    numbers = PREFILL_TOKENS["cuda"] * (8 * args.dim + 4 * args.ffn_hidden // tp)
    if copies_heads(model.device.type, model.dtype):
        numbers += 2 * room * args.head_dim * args.num_heads // tp
    return numbers * model.dtype.itemsize


def _least(number: int, ranks: Ranks) -> int:
    if ranks.tp == 1:
        return number
    least = torch.tensor(number, device=ranks.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)
