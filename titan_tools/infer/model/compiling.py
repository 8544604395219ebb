"""torch.compile as inference uses it: compiled once for every shape, and as one piece."""

from collections.abc import Callable
from typing import TypeVar

import torch

_NUM_SHAPES = 64  # that one layer, or one product, may be compiled for; torch's own limit, 8, is one for slips
_Compiled = TypeVar("_Compiled", bound=Callable)


def compile_all_shapes(function: _Compiled, *, backend: str = "inductor") -> _Compiled:
    """A function or module that compiles only in pieces is an error, not a slow run."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _NUM_SHAPES)
    # On a GPU a product with one row becomes a kernel of inductor's own only with it, and weights of 8 bits are then
    # cast on the way instead of written out in 16 bits first.
    options = {"coordinate_descent_tuning": True} if backend == "inductor" else None
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)
