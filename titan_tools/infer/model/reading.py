"""Read weights in a given order, two threads ahead of the one that makes something of them, in bounded memory.

What is read ahead and stays is part of the shard. What is read ahead to be made into something else comes on top of it,
and all of that together is never more than the largest weight.
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
from converters.layout import MIB, row_blocks
from trainer.checkpoints.arrays import as_tensor

_BLOCK_BYTES = 2 * MIB  # read at once: it is cast and copied while it lies in a core's cache
_AHEAD_BYTES = 64 * MIB  # being read while the weight before them is made use of
_NUM_READERS = 2


@dataclass(frozen=True, slots=True)
class Joined:
    """Parameters whose slices are to be one tensor, joined along dim 0; mostly there is just one."""

    fqns: tuple[str, ...]
    is_passing: bool = False  # made into something else at once: its memory is used again


def read_in_order(
    wanted: Sequence[Joined],
    slices: Mapping[str, Box],
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[Joined, Tensor]]:
    """Yield each of `wanted` with its values; a passing one's are gone once the next is asked for.

    Beside what is yielded to stay, it takes the memory of the largest of `wanted`, and what readers hold: a block each,
    and malloc's share (blocks that were freed stay with the thread that had them).
    """

    def read(target: Tensor, fqn: str, box: Box) -> None:
        target[box.slices_within(slices[fqn])].copy_(as_tensor(source.read(fqn, box), source.tensors[fqn].dtype))

    def num_bytes(joined: Joined) -> int:
        return prod(joined_shape([slices[fqn] for fqn in joined.fqns])) * dtype.itemsize

    def may_begin(joined: Joined) -> bool:
        if len(pending) >= 2 and _num_ahead(pending) >= _AHEAD_BYTES:
            return False
        return not joined.is_passing or scratch.has_room(num_bytes(joined))  # it has where nothing is pending

    def begin(joined: Joined) -> _Pending:
        boxes = [slices[fqn] for fqn in joined.fqns]
        shape = joined_shape(boxes)
        memory = scratch.take(num_bytes(joined)) if joined.is_passing else None
        if memory is None:
            weight = torch.empty(shape, dtype=dtype, device=device)
        else:
            weight = memory[: num_bytes(joined)].view(dtype).view(shape)
        reads = [
            pool.submit(read, part, fqn, block)
            for fqn, part in zip(joined.fqns, weight.split([box.sizes[0] for box in boxes]), strict=True)
            for block in _blocks(slices[fqn], source.tensors[fqn].dtype)
        ]
        return _Pending(joined, weight, memory, reads)

    pool, scratch = ThreadPoolExecutor(_NUM_READERS), _Scratch(device, most=max(map(num_bytes, wanted)))
    pending: deque[_Pending] = deque()
    following = deque(wanted)
    try:
        while True:
            while following and may_begin(following[0]):
                pending.append(begin(following.popleft()))
            if not pending:
                return
            first = pending.popleft()
            for done in first.reads:
                done.result()  # an error of a reader rises here
            yield first.joined, first.weight
            memory = first.memory
            del first  # what the caller let go of must go at once
            if memory is not None:
                scratch.give_back(memory)
            memory = None
    finally:
        pool.shutdown(cancel_futures=True)


def joined_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Of boxes that are as large in all dims but the first."""
    return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:])


@dataclass(slots=True)
class _Pending:
    joined: Joined
    weight: Tensor
    memory: Tensor | None
    reads: list[Future[None]]


class _Scratch:
    """Memory that is used again: fresh pages, which the kernel must find and clear, cost more than what is read.

    It is `most` bytes at most, in use and free. On a CPU it comes from the kernel: malloc would keep what lies between
    weights that stay.
    """

    def __init__(self, device: torch.device, *, most: int):
        self._device, self._most = device, most
        self._free: list[Tensor] = []
        self._used_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        return self._used_bytes + num_bytes <= self._most

    def take(self, num_bytes: int) -> Tensor:
        """The smallest free piece that is large enough, else a new one in the place of free ones."""
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
    """Bytes behind the first."""
    return sum(p.weight.nbytes for p in pending) - pending[0].weight.nbytes


def _blocks(box: Box, dtype: str) -> Iterator[Box]:
    if box.num_elements:
        yield from row_blocks(box, itemsize(dtype), _BLOCK_BYTES)
