"""Read weights in a given order, in two threads ahead of the caller, in bounded memory.

Weights that are read ahead and kept are part of the shard. Weights that the caller converts (packs or quantizes) need
memory on top of it, together never more than the largest weight.
"""

import mmap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from converters.catalog import Box, TensorSource
from converters.dtypes import itemsize
from converters.layout import row_blocks
from converters.sizes import MIB
from converters.threads import deferred_signals
from trainer.checkpoints.arrays import as_tensor

_BLOCK_BYTES = 2 * MIB  # read at once: it is cast and copied while it is in a core's cache
_AHEAD_BYTES = 64 * MIB  # read ahead while the caller uses the weight before
_NUM_READERS = 2


@dataclass(frozen=True, slots=True)
class Joined:
    """Parameters whose slices are concatenated along dim 0 into one tensor; mostly there is just one."""

    fqns: tuple[str, ...]
    is_temporary: bool = False  # converted at once by the caller: its memory is reused


def read_in_order(
    wanted: Sequence[Joined],
    slices: Mapping[str, Box],
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[Joined, Tensor]]:
    """Yield each of `wanted` with its values; those of a temporary one are valid until the next is requested.

    In addition to the tensors that are kept, this needs the memory of the largest of `wanted`, and for each reader a
    block and what malloc keeps for its thread.
    """

    def read(target: Tensor, fqn: str, box: Box) -> None:
        target[box.slices_within(slices[fqn])].copy_(as_tensor(source.read(fqn, box), source.tensors[fqn].dtype))

    def num_bytes(joined: Joined) -> int:
        return prod(joined_shape([slices[fqn] for fqn in joined.fqns])) * dtype.itemsize

    def may_begin(joined: Joined) -> bool:
        if len(pending) >= 2 and _num_ahead(pending) >= _AHEAD_BYTES:
            return False
        return not joined.is_temporary or scratch.has_room(num_bytes(joined))  # always true where nothing is pending

    def begin(joined: Joined) -> _Pending:
        boxes = [slices[fqn] for fqn in joined.fqns]
        shape = joined_shape(boxes)
        memory = scratch.take(num_bytes(joined)) if joined.is_temporary else None
        if memory is None:
            weight = torch.empty(shape, dtype=dtype, device=device)
        else:
            weight = memory[: num_bytes(joined)].view(dtype).view(shape)
        reads = [
            pool.submit(read, part, fqn, block)
            for fqn, part in zip(joined.fqns, torch.split(weight, [box.sizes[0] for box in boxes]), strict=True)
            for block in _blocks(slices[fqn], source.tensors[fqn].dtype)
        ]
        return _Pending(joined, weight, memory, reads)

    pool, scratch = ThreadPoolExecutor(_NUM_READERS), _Scratch(device, most=max(map(num_bytes, wanted)))
    pending: deque[_Pending] = deque()
    following = deque(wanted)
    with deferred_signals() as deliver_signals:
        try:
            while True:
                deliver_signals()
                while following and may_begin(following[0]):
                    pending.append(begin(following.popleft()))
                if not pending:
                    return
                first = pending.popleft()
                for done in first.reads:
                    done.result()  # raises a reader's error
                yield first.joined, first.weight
                memory = first.memory
                del first  # no reference may keep what the caller has freed
                if memory is not None:
                    scratch.give_back(memory)
                memory = None
        finally:
            pool.shutdown(cancel_futures=True)


def joined_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape of boxes concatenated along dim 0; their other dims are equal."""
    return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:])


@dataclass(slots=True)
class _Pending:
    joined: Joined
    weight: Tensor
    memory: Tensor | None
    reads: list[Future[None]]


class _Scratch:
    """Reused memory of at most `most` bytes: to clear fresh pages costs the kernel more than reading the weights.

    On a CPU it comes from mmap: malloc could not return memory that is between weights that are kept.
    """

    def __init__(self, device: torch.device, *, most: int):
        self._device, self._most = device, most
        self._free: list[Tensor] = []
        self._used_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        return self._used_bytes + num_bytes <= self._most

    def take(self, num_bytes: int) -> Tensor:
        """The smallest free piece that is large enough, else a new one instead of free ones."""
        fitting = [n for n, memory in enumerate(self._free) if memory.nbytes >= num_bytes]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda n: self._free[n].nbytes))
        else:
            while self._free and self._used_bytes + sum(m.nbytes for m in self._free) + num_bytes > self._most:
                self._free.pop(0)
            memory = self._new(num_bytes)
        self._used_bytes += memory.nbytes
        return memory

    def give_back(self, memory: Tensor) -> None:
        self._used_bytes -= memory.nbytes
        self._free.append(memory)

    def _new(self, num_bytes: int) -> Tensor:
        if self._device.type == "cpu" and num_bytes:
            return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _num_ahead(pending: Sequence[_Pending]) -> int:
    """Bytes of all but the first."""
    return sum(p.weight.nbytes for p in pending) - pending[0].weight.nbytes


def _blocks(box: Box, dtype: str) -> Iterator[Box]:
    if box.num_elements:
        yield from row_blocks(box, itemsize(dtype), _BLOCK_BYTES)
