"""torch.compile for inference: for every shape separately, and without graph breaks."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from converters.common.errors import ConfigError
from trainer.parallel.compile import why_inductor_cannot

_NUM_SHAPES = 64  # for which one layer or product may be compiled; torch's own limit, 8, is meant to catch mistakes
_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])


def compile_all_shapes(function: _Compiled, *, backend: str = "inductor") -> _Compiled:
    """torch.compile, in which a graph break is an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _NUM_SHAPES)
    # On a GPU, inductor generates its own kernel for a product with one row only with this option; the kernel casts
    # 8-bit weights while it reads them, instead of writing them out in 16 bits first
    options: Any = {"coordinate_descent_tuning": True} if backend == "inductor" else None
    compiled: Any = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)
    return compiled  # type: ignore[no-any-return]


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if no compiler is installed for the code that torch.compile generates."""
    if reason := why_inductor_cannot(device):
        raise ConfigError(f"--compile: {reason}", tries=["without --compile"])


def compiled_body(body: nn.Module, *, backend: str) -> nn.Module:
    """A copy of `body` with compiled layers that shares all weights and caches; `body` stays as it is."""
    compiled = copy.copy(body)
    compiled._modules = dict(body._modules)  # a shallow copy shares the dict, and the next line would change both
    layers: Any = body.layers
    compiled.layers = nn.ModuleDict({n: compile_all_shapes(layer, backend=backend) for n, layer in layers.items()})
    return compiled
