"""Fake tensors that know what they would be, and a count of the collectives that a step issues over them.

No memory, no arithmetic, no peers: shapes and dtypes run through the very operations that training would run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_KINDS = {  # how operations of torch's two libraries of collectives begin
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}


@dataclass(slots=True)
class Traffic:
    """Calls of one kind over one group, and the bytes of their larger side (what is gathered, what is scattered)."""

    calls: int = 0
    bytes: int = 0


class CollectiveCount:
    """Traffic by (kind, group's name). `times`: how often what is seen at the moment happens in a step."""

    def __init__(self):
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self.times = 1

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Within, each call stands for so many."""
        before, self.times = self.times, times
        try:
            yield
        finally:
            self.times = before

    def see(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note an operation if it is a collective."""
        if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return
        name = func._opname
        kind = next((kind for beginning, kind in _KINDS.items() if name.startswith(beginning)), None)
        if kind is None:
            return  # a wait, or a barrier
        found = self.traffic[kind, _group_of(args)]
        found.calls += self.times
        found.bytes += self.times * _payload_bytes(args)


def _group_of(args: tuple[Any, ...]) -> str:
    """Functional collectives name their group, last; the others hold it, before their reduction."""
    held = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    if held is not None:
        return dist.ProcessGroup.unbox(held).group_name
    return next(arg for arg in reversed(args) if isinstance(arg, str))


def _payload_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the larger side. Functional all-gathers have only the smaller one, and say by what it grows."""
    first = tree_leaves(args[0])
    sides = [sum(t.nbytes for t in first)]
    if len(args) > 1:
        second = [t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)]
        sides.append(sum(t.nbytes for t in second))
    grows = args[1] if len(args) == 3 and isinstance(args[1], int) else 1
    return max(sides) * grows


class TracedTensors(FakeTensorMode):
    """Fake tensors whose collectives are counted; a number that is asked of one is 1."""

    def __init__(self, count: CollectiveCount):
        super().__init__(allow_non_fake_inputs=True)
        self.count = count

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if all(kind in _PLAIN for kind in types):  # a DTensor comes again, as what it wraps
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1.0 if args[0].is_floating_point() else 1
            self.count.see(func, args)
        return super().dispatch(func, types, args, kwargs or {})
