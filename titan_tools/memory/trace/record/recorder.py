"""Fake tensors whose allocations are written down: each storage that comes and goes, and where the step stands."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from titan_tools.memory.trace.events import COMPUTE, Block, Place, Segment, Trace
from titan_tools.memory.trace.kernels.cuda_buffers import OwnBuffers
from titan_tools.memory.trace.record import owners
from titan_tools.memory.trace.record.answers import note_question, number_in
from titan_tools.memory.trace.record.gradient_sums import holders_of_a_gradient, is_sum_in_place

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))

# What a block is by default, from where the step stands: see `Recorder._part`
_OF_PHASE = {"build": "parameters", "states": "optimizer", "clip": "optimizer", "optimizer": "optimizer"}
_LOSS_MODULES = ("output", "loss")


class Recorder:
    """The trace as it grows. `place` is set by those who watch the step; `part` says what is allocated, unless None."""

    def __init__(self):
        self.trace = Trace()
        self.place = Place(0, "build")
        self.first_microbatch = 0  # of the batch that a pipeline works on, within the step
        self.part: str | None = None
        self.owner = ""  # of what is allocated
        self.module_fqns: dict[Any, str] = {}
        self.layers_of_parts: list[frozenset[int]] = []  # of each stage that the rank holds
        self.stream_names: dict[int, str] = {}  # by id
        self._streams: list[Any] = []  # kept, so that ids stay theirs
        self._live: dict[int, int] = {}  # storage → block
        self._watched: dict[int, Any] = {}
        self._segment: Segment | None = None
        self.is_paused = False
        self.counts_steps_on_host = False  # so does every optimizer but a fused one, with numbers that lie there, too
        self._is_over = False

    # --- what happens

    def allocate(self, num_bytes: int, *, part: str | None = None, stream: str | None = None) -> int:
        """Write an allocation down; the block's number."""
        block = len(self.trace.blocks)
        stream = stream or self._stream()
        self.trace.blocks.append(Block(num_bytes, stream, part or self._part(stream), self.place, self.owner))
        self._event(block)
        return block

    def free(self, block: int) -> None:
        self._event(~block)

    def finish(self) -> Trace:
        """The trace. What is let go of later belongs to the tearing down, which no run does."""
        self._is_over = True
        return self.trace

    def see(self, tensor: Tensor) -> None:
        """Write down a tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._watched or self.is_paused:
            return
        num_bytes = storage.nbytes()
        if num_bytes:
            self._live[key] = self.allocate(num_bytes)
        self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """A storage gave its memory back, or took some: what FSDP does with gathered parameters."""
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
        if (block := self._live.pop(key, None)) is not None:
            self.free(block)
        if num_bytes:
            self._live[key] = self.allocate(num_bytes)

    def leave_out(self, tensor: Tensor) -> None:
        """Take back what was written down of a tensor that lies elsewhere."""
        if (block := self._live.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self.free(block)

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that a tensor, or this rank's part of one, lies in; None if it has none."""
        # DTensor.to_local would make a view of it, an operation to trace
        local = getattr(tensor, "_local_tensor", tensor)
        if hasattr(local, "fsdp_pre_all_gather"):  # torchao's weights, which are around what holds memory
            local = local._tensor
        block = self._live.get(local.untyped_storage()._cdata)
        return None if block is None else self.trace.blocks[block]

    def reclassify(self, tensor: Tensor, part: str, *, owner: str = "") -> None:
        """What a block has turned out to be."""
        if block := self.block_of(tensor):
            block.part, block.owner = part, owner or block.owner

    # --- where it happens

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    @contextmanager
    def as_part(self, part: str, *, owner: str = "") -> Iterator[None]:
        """Within, what is allocated is this."""
        before = self.part, self.owner
        self.part, self.owner = part, owner
        try:
            yield
        finally:
            self.part, self.owner = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing that comes is written down."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def name_stream(self, stream: Any, name: str) -> None:
        self._streams.append(stream)
        self.stream_names[id(stream)] = name

    def _stream(self) -> str:
        return self.stream_names.get(id(torch.cpu.current_stream()), COMPUTE)

    def _part(self, stream: str) -> str:
        if self.part:
            return self.part
        if stream != COMPUTE:
            return "all_gather" if stream.startswith("all_gather") else "reduce_scatter"
        phase, module = self.place.phase, self.place.module
        if phase in _OF_PHASE:
            return _OF_PHASE[phase]
        if module in _LOSS_MODULES:
            return "logits_and_loss"
        return {"forward": "activations", "backward": "recompute", "weight": "recompute"}.get(phase, "other")

    def _gone(self, key: int) -> None:
        self._watched.pop(key, None)
        if (block := self._live.pop(key, None)) is not None:
            self.free(block)

    def _event(self, event: int) -> None:
        if self._is_over:
            return
        if self._segment is None or self._segment.place != self.place:
            self._segment = Segment(self.place)
            self.trace.segments.append(self._segment)
        self._segment.events.append(event)


class RecordedTensors(FakeTensorMode):
    """Fake tensors that a recorder watches; answers.py says what number is in one.

    `workspaces`: what kernels allocate inside of themselves, by operation.
    """

    def __init__(self, recorder: Recorder, workspaces: Mapping[Any, OwnBuffers]):
        self._alone = holders_of_a_gradient()
        # An operation without a fake kernel is refused, and not run on real memory to see what comes out
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.recorder, self.workspaces = recorder, workspaces

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        # A DTensor comes again, as what it wraps; super() says so too, after it has described all tensors
        if DTensor in types:
            return NotImplemented
        if func is torch.ops.prim.device.default:  # half of all that is asked
            return args[0].device
        if func.namespace == "profiler":  # the names that FSDP gives its doings
            return func(*args, **(kwargs or {}))
        is_plain = _PLAIN.issuperset(types)
        if is_plain and func is torch.ops.aten._local_scalar_dense.default:
            return number_in(args[0])
        if is_plain and (
            func is torch.ops._c10d_functional.wait_tensor.default or is_sum_in_place(func, args, self._alone)
        ):
            return args[0]  # as they would be, had they memory
        if func is torch.ops.aten._scaled_mm.out:  # which torch has no fake kernel for
            return kwargs["out"]
        if not is_plain:
            return super().dispatch(func, types, args, kwargs or {})
        with self.recorder.paused():  # what a fake kernel is put together from is no kernel's doing
            made = super().dispatch(func, types, args, kwargs or {})
        note_question(func, made)
        if not self.recorder.is_paused and not self._is_for_counting(func):
            see = self.recorder.see
            if isinstance(made, FakeTensor):
                see(made)
            elif isinstance(made, (tuple, list)):
                for each in tree_iter(made):
                    if isinstance(each, FakeTensor):
                        see(each)
            if workspace := self.workspaces.get(func):
                self._within_kernel(workspace(args), args)  # beside what the kernel gives back
            if self.recorder.place.phase in owners.PHASES:
                owners.tell_owners(self.recorder, args, made)
        return made

    def _is_for_counting(self, func: Any) -> bool:
        """Whether an operation makes a tensor of a number for an optimizer that counts its steps on the host."""
        recorder = self.recorder
        return (
            recorder.counts_steps_on_host
            and recorder.place.phase == "optimizer"
            and func is torch.ops.aten.lift_fresh.default
        )

    def _within_kernel(self, num_bytes: int, args: tuple) -> None:
        if num_bytes:
            block = self.recorder.allocate(num_bytes, part="workspaces")
            if isinstance(args[0], (list, tuple)):
                self.recorder.trace.blocks[block].owner = owners.owner_of_list(self.recorder, args[0])
            self.recorder.free(block)


@contextmanager
def resizes_recorded(recorder: Recorder) -> Iterator[None]:
    """Within, storages that are resized tell the recorder."""
    own = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.nbytes() == size:
            return storage
        result = own(storage, size)
        recorder.resized(storage, size)
        return result

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = own
