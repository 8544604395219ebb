"""Read weights in a given order, in two threads ahead of the caller, in bounded memory.

Weights that are read ahead and kept are part of the shard. Weights that the caller converts (packs or quantizes) need
memory on top of it, together never more than the largest weight.
"""

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from converters.common.box import Box, TensorSource, row_blocks
from converters.common.dtypes import itemsize
from converters.common.sizes import MIB
from converters.common.threads import deferred_signals
from trainer.checkpoints.arrays import as_tensor

_BLOCK_BYTES = 2 * MIB  # read at once: it is cast and copied while it is in a core's cache
_AHEAD_BYTES = 64 * MIB  # read ahead while the caller uses the weight before
_NUM_READERS = 2


@dataclass(frozen=True, slots=True)
class Joined:
    """Boxes of parameters that are concatenated along `dim` into one tensor of `dtype`; mostly there is just one."""

    boxes: tuple[tuple[str, Box], ...]  # (FQN, box in the unsharded parameter)
    dtype: torch.dtype
    dim: int = 0
    is_temporary: bool = False  # converted at once by the caller: its memory is reused

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the boxes make together: they differ in `dim` only."""
        sizes = list(self.boxes[0][1].sizes)
        sizes[self.dim] = sum(box.sizes[self.dim] for _, box in self.boxes)
        return tuple(sizes)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_in_order(
    wanted: Sequence[Joined], source: TensorSource, *, device: torch.device
) -> Iterator[tuple[Joined, Tensor]]:
    """Yield each of `wanted` with its values; those of a temporary one are valid until the next is requested.

    In addition to the tensors that are kept, this needs the memory of the largest of `wanted`, and for each reader a
    block and what malloc keeps for its thread.
    """

    def read(target: Tensor, fqn: str, box: Box, block: Box) -> None:
        target[block.slices_within(box)].copy_(as_tensor(source.read(fqn, block), source.tensors[fqn].dtype))

    def may_begin(joined: Joined) -> bool:
        if len(pending) >= 2 and _num_ahead(pending) >= _AHEAD_BYTES:
            return False
        return not joined.is_temporary or scratch.has_room(joined.num_bytes)  # always true where nothing is pending

    def begin(joined: Joined) -> _Pending:
        memory = scratch.take(joined.num_bytes) if joined.is_temporary else None
        if memory is None:
            weight = torch.empty(joined.shape, dtype=joined.dtype, device=device)
        else:
            weight = memory[: joined.num_bytes].view(joined.dtype).view(joined.shape)
        sizes = [box.sizes[joined.dim] for _, box in joined.boxes]
        reads = [
            pool.submit(read, part, fqn, box, block)
            for (fqn, box), part in zip(joined.boxes, torch.split(weight, sizes, dim=joined.dim), strict=True)
            for block in _blocks(box, source.tensors[fqn].dtype)
        ]
        return _Pending(joined, weight, memory, reads)

    pool, scratch = ThreadPoolExecutor(_NUM_READERS), _Scratch(device, most=max(joined.num_bytes for joined in wanted))
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
    """Rows of `box`; of stacked experts, those of one after another."""
    if not box.num_elements:
        return
    if len(box.sizes) < 3:
        yield from row_blocks(box, itemsize(dtype), _BLOCK_BYTES)
        return
    first, num = box.offsets[0], box.sizes[0]
    for expert in range(first, first + num):
        for rows in row_blocks(Box(box.offsets[1:], box.sizes[1:]), itemsize(dtype), _BLOCK_BYTES):
            yield Box((expert, *rows.offsets), (1, *rows.sizes))
