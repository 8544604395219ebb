"""The trace of a rank while it is recorded: allocations, frees, and the parameter that each block belongs to."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from titan_tools.memory.trace.events import (
    COMPUTE,
    NO_LAYER,
    PER_PARAMETER,
    Block,
    StepPoint,
    Trace,
    TraceSegment,
    layer_of,
    repetition,
)

# The default part of a block, by the phase of the step: see `Recorder._default_part`
_PART_OUTSIDE_MODEL = {"build": "parameters", "states": "optimizer", "clip": "optimizer", "optimizer": "optimizer"}
_PART_IN_MODEL = {"forward": "activations", "backward": "recompute", "weight": "recompute"}
_LOSS_MODULES = ("output", "loss")
PHASES_WITH_OWNERS = ("clip", "optimizer")  # in which tensors are made from parameters, gradients and states


class Recorder:
    """A trace that grows. `point` is the current point of the step; `part`, if set, the part of what is allocated."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.point = StepPoint(0, "build")
        self.first_microbatch = 0  # within the step, of the batch that a pipeline works on
        self.part: str | None = None
        self.owner = ""  # of what is allocated
        self.module_fqns: dict[Any, str] = {}
        self.layers_of_parts: list[frozenset[int]] = []  # of each stage that the rank holds
        self.parameters_per_layer: Mapping[int, int] = {}
        self.stream_names: dict[int, str] = {}  # by id
        self.is_paused = False
        self.counts_steps_on_host = False  # true of every optimizer but a fused one
        self._streams: list[Any] = []  # kept alive, so that ids stay unique
        self._live: dict[int, int] = {}  # storage → block
        self._watched: dict[int, Any] = {}  # storage → weak reference
        self._segment: TraceSegment | None = None
        self._is_finished = False

    def allocate(self, num_bytes: int, *, part: str | None = None, stream: str | None = None) -> int:
        """Record an allocation; returns the block's number."""
        block = len(self.trace.blocks)
        stream = stream or self._current_stream()
        self.trace.blocks.append(
            Block(num_bytes, stream, part or self.part or self._default_part(stream), self.point, self.owner)
        )
        self._add_event(block)
        return block

    def free(self, block: int) -> None:
        self._add_event(~block)

    def finish(self) -> Trace:
        """The trace. Frees after this belong to the teardown and are not recorded."""
        self._is_finished = True
        return self.trace

    def record(self, tensor: Tensor) -> None:
        """Record a tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._watched or self.is_paused:
            return
        num_bytes = storage.nbytes()
        if num_bytes:
            self._live[key] = self.allocate(num_bytes)
        self._watched[key] = weakref.ref(storage, lambda _: self._storage_freed(key))

    def record_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Record a storage's new size: FSDP frees and allocates gathered parameters this way."""
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._storage_freed(key))
        if (block := self._live.pop(key, None)) is not None:
            self.free(block)
        if num_bytes:
            self._live[key] = self.allocate(num_bytes)

    def forget(self, tensor: Tensor) -> None:
        """Take back the record of a tensor that is not in GPU memory."""
        if (block := self._live.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self.free(block)

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that holds a tensor, or a DTensor's local part; None if there is none."""
        # DTensor.to_local would make a view, an operation that would be traced
        local: Any = getattr(tensor, "_local_tensor", tensor)
        if hasattr(local, "fsdp_pre_all_gather"):  # torchao's wrapper of a weight
            local = local._tensor
        block = self._live.get(local.untyped_storage()._cdata)
        return None if block is None else self.trace.blocks[block]

    def reclassify(self, tensor: Tensor, part: str, *, owner: str = "") -> None:
        """Set the part, and if given the owner, of a tensor's block."""
        if block := self.block_of(tensor):
            block.part, block.owner = part, owner or block.owner

    @contextmanager
    def at(self, point: StepPoint) -> Iterator[None]:
        before, self.point = self.point, point
        try:
            yield
        finally:
            self.point = before

    @contextmanager
    def as_part(self, part: str, *, owner: str = "") -> Iterator[None]:
        """Give what is allocated this part and owner."""
        before = self.part, self.owner
        self.part, self.owner = part, owner
        try:
            yield
        finally:
            self.part, self.owner = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing new."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def resizes_recorded(self) -> Iterator[None]:
        """Record every resized storage."""
        own = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if storage.nbytes() == size:
                return storage
            result: torch.UntypedStorage = own(storage, size)
            self.record_resize(storage, size)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    def name_stream(self, stream: Any, name: str) -> None:
        self._streams.append(stream)
        self.stream_names[id(stream)] = name

    def _current_stream(self) -> str:
        return self.stream_names.get(id(torch.cpu.current_stream()), COMPUTE)

    def _default_part(self, stream: str) -> str:
        if stream != COMPUTE:
            return "all_gather" if stream.startswith("all_gather") else "reduce_scatter"
        if self.point.phase in _PART_OUTSIDE_MODEL:
            return _PART_OUTSIDE_MODEL[self.point.phase]
        if self.point.module in _LOSS_MODULES:
            return "logits_and_loss"
        return _PART_IN_MODEL.get(self.point.phase, "other")

    def _storage_freed(self, key: int) -> None:
        self._watched.pop(key, None)
        if (block := self._live.pop(key, None)) is not None:
            self.free(block)

    def _add_event(self, event: int) -> None:
        if self._is_finished:
            return
        if self._segment is None or self._segment.point != self.point:
            self._segment = TraceSegment(self.point)
            self.trace.segments.append(self._segment)
        self._segment.events.append(event)


def assign_owners(recorder: Recorder, args: Sequence[Any], result: Any) -> None:
    """Give what an operation makes from a parameter's tensor to that parameter; of a list, each to each.

    What is stacked from many parameters holds a number for each; so does what is made from that element by element.
    """
    given = args[0] if args else None
    if isinstance(result, Tensor):
        if isinstance(given, Tensor):
            owner = _owner(recorder, given)
            if not owner.startswith(PER_PARAMETER) or result.numel() == given.numel():
                _assign(recorder, result, owner)
        elif isinstance(given, (list, tuple)):
            _assign(recorder, result, owner_of_list(recorder, given))
    elif isinstance(result, (list, tuple)) and isinstance(given, (list, tuple)) and len(result) == len(given):
        for one, source in zip(result, given, strict=True):
            if isinstance(one, Tensor) and isinstance(source, Tensor):
                _assign(recorder, one, _owner(recorder, source))


def owner_of_list(recorder: Recorder, given: Sequence[Any]) -> str:
    """The owner of a tensor that holds as much for each tensor of a list; "" if one of these has no owner."""
    owners = [_owner(recorder, one) for one in given if isinstance(one, Tensor)]
    return (
        owner_of_many(owners, recorder.layers_of_parts, recorder.parameters_per_layer) if owners and all(owners) else ""
    )


def owner_of_many(
    fqns: Sequence[str], parts: Sequence[Set[int]], per_layer: Mapping[int, int] = MappingProxyType({})
) -> str:
    """The owner of a tensor with a number per FQN: "*{outside of layers}+{per layer}", or "*" if layers differ.

    Unless it has one for each of their parameters, `per_layer`: then the numbers of layers until they repeat, separated
    by commas; those of first layers that do not come again end in a semicolon.
    `parts`: the layers of each stage that the rank holds. Of the n-th stage alone: "*{outside}+{per layer}@{n}".
    """
    if any(fqn.startswith(PER_PARAMETER) for fqn in fqns):
        return PER_PARAMETER
    by_layer = Counter(map(layer_of, fqns))
    outside = by_layer.pop(NO_LAYER, 0)
    if not by_layer:
        return f"{PER_PARAMETER}{outside}+0"
    parts = [part for part in parts if part]
    counts = [by_layer[layer] for layer in sorted(by_layer)]
    if len(set(counts)) > 1 and any(by_layer[layer] != per_layer.get(layer) for layer in by_layer):
        return PER_PARAMETER
    period, alone = repetition(counts)
    parts_of = (counts[:alone], counts[alone : alone + period])
    owner = f"{PER_PARAMETER}{outside}+{';'.join(','.join(map(str, some)) for some in parts_of if some)}"
    if by_layer.keys() == set().union(*parts):
        return owner
    return f"{owner}@{parts.index(by_layer.keys())}" if by_layer.keys() in parts else PER_PARAMETER


def _owner(recorder: Recorder, tensor: Tensor) -> str:
    block = recorder.block_of(tensor)
    return block.owner if block else ""


def _assign(recorder: Recorder, tensor: Tensor, owner: str) -> None:
    block = recorder.block_of(tensor)
    if block and not block.owner:
        block.owner = owner
