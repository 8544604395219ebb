"""torch.compile for decoding: every layer runs the same compiled code, and the output layer some of its own."""

import copy

import torch
from torch import nn

from converters.errors import ConfigError
from titan_tools.infer.model.compiling import compile_all_shapes
from trainer.parallel.compile import why_inductor_cannot


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError where nothing is there to compile what torch.compile writes."""
    if reason := why_inductor_cannot(device):
        raise ConfigError(f"--compile: {reason}", tries=["without --compile"])


def compiled_body(body: nn.Module, *, backend: str) -> nn.Module:
    """`body` with compiled layers; the given one, which shares all weights and caches, stays as it is."""
    compiled = copy.copy(body)
    compiled._modules = dict(body._modules)  # a shallow copy shares it, and the next line would change both
    compiled.layers = nn.ModuleDict({n: compile_all_shapes(layer, backend=backend) for n, layer in body.layers.items()})
    return compiled
