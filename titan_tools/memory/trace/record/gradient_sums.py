"""Gradients that meet in autograd: their sum takes the first one's memory where nobody else holds that.

torch never does so with fake tensors, which would count each such sum as memory of its own: at a residual stream, where
the gradients of a block and of what goes past it meet, that is a gradient of the hidden states per layer.
"""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses.fake_tensor import FakeTensorMode

Holders = tuple[int, int, int]  # of a tensor, of its memory, and of its object in Python


def is_sum_in_place(func: Any, args: tuple, alone: Holders) -> bool:
    """Whether autograd would add `args[1]` to `args[0]` in place, had the tensors memory.

    As `InputBuffer` decides, in torch/csrc/autograd/input_buffer.cpp: the first gradient to come lies densely, and
    neither it nor its memory has another holder. Gradients of gradients, which we never take, are always new.
    `alone`: what holders_of_a_gradient told.
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    return isinstance(args[1], Tensor) and _holders(args) == alone and is_dense(args[0])


def _holders(args: tuple) -> Holders:
    """How many the first of an operation's tensors has, with those on the way from autograd to here.

    Python's are counted too: what a compiler has written keeps tensors in names, of which torch 2.11 counts no trace.
    """
    first = args[0]
    return first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata), sys.getrefcount(first)


@cache
def holders_of_a_gradient() -> Holders:
    """Those of one that only autograd holds, as a mode's dispatch sees them: seen, as they differ between versions.

    Not to be called from within a dispatch, which knows no gradients.
    """
    seen = []

    class Sums(FakeTensorMode):
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                seen.append(_holders(args))
            return super().dispatch(func, types, args, kwargs or {})

    with Sums(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        torch.cat((y.sin(), y.cos())).sum().backward()
    assert len(seen) == 1, seen
    return seen[0]
