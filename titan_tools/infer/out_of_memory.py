"""Memory that runs out: one error that says what took it, and which options would take less."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from converters.errors import TitanError
from converters.families.registry import get_family
from converters.model_info import ModelInfo
from titan_tools.infer.free_memory import GIB
from titan_tools.infer.model.load import SlicedModel
from titan_tools.infer.model.slices import valid_tp
from titan_tools.infer.options import is_conversation
from titan_tools.infer.task import Work
from titan_tools.launch import inside_launch, started_by_titan
from titan_tools.machine_errors import as_memory_error


class OutOfMemory(TitanError):
    """The memory of a machine, a GPU, a container or a shell was not enough."""


@contextmanager
def memory_for_weights(work: Work, info: ModelInfo) -> Iterator[None]:
    """Around what loads a rank's part of the model. Raises OutOfMemory where memory runs out inside."""
    num = sum(prod(parameter.shape) for parameter in get_family(info.family).parameters(info.args))
    dtype = work.request.quantize or work.dtype
    num_gib = num * (1 if work.request.quantize else getattr(torch, dtype).itemsize) / work.tp / GIB
    with _told(f" while reading the weights, about {num_gib:.2f} GiB per rank in {dtype}", _tries_of_weights(work)):
        yield


@contextmanager
def memory_for_sequences(work: Work, model: SlicedModel, *, rows: int, room: int) -> Iterator[None]:
    """Around what puts `rows` sequences of up to `room` tokens through `model`; raises like `memory_for_weights`."""
    sequences = f"{rows:,} sequences of" if rows > 1 else "a sequence of up to"
    num_gib = rows * room * model.bytes_per_cached_token / GIB
    cache = f"the cache of {sequences} {room:,} tokens takes {num_gib:.2f} GiB per rank beside the weights"
    with _told(f": {cache}", [*_tries_of_sequences(work, rows=rows, room=room), *_tries_of_weights(work)]):
        yield


def _tries_of_sequences(work: Work, *, rows: int, room: int) -> Iterator[str]:
    request = work.request
    if rows > 1:
        yield f"--batch-size {rows // 2}"
    if is_conversation(request) or request.score:
        yield f"--context {max(2, room // 2)}"
    elif (request.max_new_tokens or 1) > 1:
        yield f"--max-new-tokens {request.max_new_tokens // 2}"


def _tries_of_weights(work: Work) -> Iterator[str]:
    more = next((tp for tp in valid_tp(work.args) if tp > work.tp), None)
    starts_ranks = not inside_launch() or started_by_titan()
    if more and starts_ranks and torch.cuda.is_available() and more <= torch.cuda.device_count():
        yield f"--tp {more}"
    if not work.request.quantize:
        yield "--quantize int8"
        if work.dtype == "float32":
            yield "--dtype bfloat16"


@contextmanager
def _told(when: str, tries: Iterator[str] | list[str]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        if (told := as_memory_error(error)) is None:
            raise
        raise OutOfMemory(f"{told.message}{when}", hint=told.hint, tries=[*tries]) from None
