"""Memory of inference: its lower bound, sequences that fit on a GPU, out-of-memory errors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from converters.common.errors import TitanError
from converters.common.sizes import GIB
from converters.families.args import DecoderArgs
from converters.families.parameters import Role
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.quantized.stored_blocks import MXFP4, BlocksSource
from converters.source.weights import NativeWeights
from titan_tools.infer.decoding.attention import copies_heads
from titan_tools.infer.decoding.engine import PREFILL_TOKENS
from titan_tools.infer.model.load import SlicedModel
from titan_tools.infer.model.quantize import STORED
from titan_tools.infer.model.reach import reach_of
from titan_tools.infer.model.tensor_parallel import slice_for_rank, valid_tp
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import is_conversation
from titan_tools.infer.task import Task, Work
from titan_tools.launch.launched import started_by_titan
from titan_tools.launch.rank import inside_launch
from titan_tools.terminal.console import count, note
from titan_tools.terminal.machine_errors import as_memory_error
from trainer.ranks.machine import available_bytes, not_enough_memory

_OTHER_BYTES = GIB  # CUDA graphs, workspaces of matrix products, NCCL's buffers, and gaps between blocks
_MXFP4_BYTES = 17 / 32  # of a value, with the scales of blocks
_BYTES_PER_LOGIT = 32  # fp32 logits and what sampling computes from them: sorted, token ids, probabilities


def rows_that_fit(model: SlicedModel, args: DecoderArgs, ranks: TPRanks, *, rows: int, room: int) -> int:
    """`rows`, or as many sequences of `room` tokens as every rank's GPU has memory for (at least one), with a note.

    On a CPU always `rows`: there the cache takes memory only as tokens are added. Every rank must call this.
    """
    if (free := free_bytes(model.device)) is None:
        return rows
    bytes_per_row = model.cache_bytes(room) + args.vocab_size * _BYTES_PER_LOGIT
    fitting = (free - _pass_bytes(model, args, tp=ranks.tp, room=room) - _OTHER_BYTES) // bytes_per_row
    fitting = max(1, min(rows, -ranks.largest(-fitting)))
    if fitting < rows and ranks.is_first:
        need = f"each needs up to {bytes_per_row / GIB:.2f} GiB of the GPU's {free / GIB:.2f} GiB of free memory"
        note(f"{count(fitting, 'sequence')} at a time instead of {rows}: {need}")
    return fitting


def free_bytes(device: torch.device) -> int | None:
    """Memory that a GPU still has for tensors; None for a CPU."""
    if device.type != "cuda":
        return None
    cached_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached_by_torch


def _pass_bytes(model: SlicedModel, args: DecoderArgs, *, tp: int, room: int) -> int:
    """Approximate activations of a prefill pass: hidden states of the layers, and copied keys and values if any."""
    inside = 4 * args.ffn_hidden // tp
    for experts in (layer.numbers for layer in model.experts):
        # For each of a token's experts: input, output, output in the token's order, and its product in fp32
        inside = max(inside, experts.top_k * (7 * args.dim + 4 * experts.hidden // tp))
    numbers = PREFILL_TOKENS["cuda"] * (8 * args.dim + inside)
    if model.latent:  # keys and values of all heads, made of a whole row's latents, and the keys before they are joined
        of_a_head = 2 * model.latent.plain_dim + model.latent.rotary_dim + model.latent.value_dim
        numbers += room * of_a_head * model.latent.num_heads // tp
    if copies_heads(model.device.type, model.dtype):
        numbers += 2 * room * args.head_dim * args.num_heads // tp
    return numbers * model.dtype.itemsize


class OutOfMemory(TitanError):
    """The memory of a machine, a GPU, a container or a shell was not enough."""


def weight_bytes(work: Work, weights: NativeWeights, rank: int) -> int:
    """A lower bound of a rank's weights as they are held: in the dtype of the computation, in 8 bits, or in blocks.

    Without biases, scales of rows, and what packing for a CPU adds.
    """
    info, dtype_bytes = weights.info, getattr(torch, work.dtype).itemsize
    family = get_family(info.family)
    blocks = family.blocks(info.decoder)
    stored = BlocksSource(weights.source).blocks if work.request.quantize == STORED else {}
    total: float = 0
    for parameter in family.parameters(info.decoder):
        num = slice_for_rank(parameter, info.decoder, tp=work.tp, rank=rank).num_elements
        is_latent_value = parameter.module.endswith(".wkv_b") and blocks[parameter.layer or 0].latent is not None
        is_rounded = (parameter.is_linear_weight or parameter.expert_dim is not None) and not is_latent_value
        if parameter.is_bias:
            continue
        if parameter.fqn in stored and is_rounded:
            total += num * (_MXFP4_BYTES if stored[parameter.fqn].format == MXFP4 else 1)
        elif is_rounded and work.request.quantize not in (None, STORED):
            total += num
        else:
            total += num * dtype_bytes
        if parameter.role is Role.EMBEDDING and info.decoder.tied and work.request.quantize not in (None, STORED):
            total += num  # the output has a rounded copy
    return int(total)


def cache_bytes(work: Work, info: ModelInfo, num_tokens: int) -> int:
    """Keys and values of a sequence of `num_tokens` tokens in all layers on a rank."""
    args, blocks = info.decoder, get_family(info.family).blocks(info.decoder)
    latent = blocks[0].latent
    heads = max(1, args.num_kv_heads // work.tp)
    per_token = latent.kv_rank + latent.rotary_dim if latent else 2 * args.head_dim * heads
    slots = sum(reach_of(block.attention, num_tokens).size for block in blocks) if num_tokens > 0 else 0
    return slots * per_token * int(getattr(torch, work.dtype).itemsize)


def least_bytes(work: Work, weights: NativeWeights, rank: int, *, num_tokens: int) -> int:
    """What a rank needs at least: its weights, and the cache of `num_tokens` tokens."""
    return weight_bytes(work, weights, rank) + cache_bytes(work, weights.info, num_tokens)


def require_on_host(work: Work, weights: NativeWeights, task: Task, on_it: Iterable[int], *, place: str) -> None:
    """Raise ConfigError if these ranks of this machine need more host memory than is available.

    Of the cache the tokens count that are certainly computed: on a CPU it takes memory only as tokens are added.
    """
    needed = sum(least_bytes(work, weights, rank, num_tokens=task.least_tokens) for rank in on_it)
    _require(work, needed, available_bytes(), place=place)


def require_on_gpu(work: Work, weights: NativeWeights, task: Task, ranks: TPRanks) -> None:
    """Raise ConfigError if this rank's GPU has less free memory than its weights and one row of the cache need."""
    needed = least_bytes(work, weights, ranks.rank, num_tokens=task.room)
    _require(work, needed, free_bytes(ranks.device), place=f"the GPU of rank {ranks.rank}")


def _require(work: Work, needed: int, available: int | None, *, place: str) -> None:
    if available is not None and needed > available and not work.request.ignore_memory:
        raise not_enough_memory(
            needed,
            available,
            whose="the model",
            place=place,
            hint=f"weights in {work.weights_dtype} and the cache of a sequence alone; activations come in addition",
            tries=list(_weight_tries(work)),
        )


@contextmanager
def memory_for_weights(work: Work, weights: NativeWeights, rank: int) -> Iterator[None]:
    """Raise OutOfMemory, with fixes, if loading a rank's weights runs out of memory."""
    num_gib = weight_bytes(work, weights, rank) / GIB
    dtype = work.weights_dtype
    with _explained(f" while reading the weights, about {num_gib:.2f} GiB per rank in {dtype}", _weight_tries(work)):
        yield


@contextmanager
def memory_for_sequences(work: Work, model: SlicedModel, *, rows: int, room: int) -> Iterator[None]:
    """Raise OutOfMemory, with fixes, if `rows` sequences of up to `room` tokens run out of memory."""
    sequences = f"{rows:,} sequences of" if rows > 1 else "a sequence of up to"
    num_gib = rows * model.cache_bytes(room) / GIB
    cache = f"the cache of {sequences} {room:,} tokens takes {num_gib:.2f} GiB per rank in addition to the weights"
    with _explained(f": {cache}", [*_sequence_tries(work, rows=rows, room=room), *_weight_tries(work)]):
        yield


def _sequence_tries(work: Work, *, rows: int, room: int) -> Iterator[str]:
    request = work.request
    if rows > 1:
        yield f"--batch-size {rows // 2}"
    if is_conversation(request) or request.score:
        yield f"--context {max(2, room // 2)}"
    elif request.max_new_tokens and request.max_new_tokens > 1:
        yield f"--max-new-tokens {request.max_new_tokens // 2}"


def _weight_tries(work: Work) -> Iterator[str]:
    more = next((tp for tp in valid_tp(work.args) if tp > work.tp), None)
    starts_ranks = not inside_launch() or started_by_titan()
    if more and starts_ranks and torch.cuda.is_available() and more <= torch.cuda.device_count():
        yield f"--tp {more}"
    if not work.request.quantize:
        yield "--quantize int8"
        if work.dtype == "float32":
            yield "--dtype bfloat16"


@contextmanager
def _explained(when: str, tries: Iterable[str]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        if (memory_error := as_memory_error(error)) is None:
            raise
        raise OutOfMemory(f"{memory_error.message}{when}", hint=memory_error.hint, tries=[*tries]) from None
