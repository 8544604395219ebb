"""torch.compile for decoding: every layer runs the same compiled code, and the output layer some of its own."""

import copy

import torch
from torch import nn

from converters.errors import ConfigError
from trainer.parallel.compile import why_inductor_cannot

_NUM_SHAPES = 64  # that one layer may be compiled for; torch's own limit, 8, is one for slips


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError where nothing is there to compile what torch.compile writes."""
    if reason := why_inductor_cannot(device):
        raise ConfigError(f"--compile: {reason}", tries=["without --compile"])


def compiled_body(body: nn.Module, *, backend: str) -> nn.Module:
    """`body` with compiled layers; the given one, which shares all weights and caches, stays as it is."""
    compiled = copy.copy(body)
    compiled._modules = dict(body._modules)  # a shallow copy shares it, and the next line would change both
    compiled.layers = nn.ModuleDict({n: compiled_module(layer, backend=backend) for n, layer in body.layers.items()})
    return compiled


def compiled_module(module: nn.Module, *, backend: str) -> nn.Module:
    """A module that compiles only in pieces is an error, not a slow run."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _NUM_SHAPES)
    # On a GPU a product with one row becomes a kernel of inductor's own only with it, and weights of 8 bits are then
    # cast on the way instead of written out in 16 bits first.
    options = {"coordinate_descent_tuning": True} if backend == "inductor" else None
    return torch.compile(module, backend=backend, fullgraph=True, dynamic=False, options=options)
