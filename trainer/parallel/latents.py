"""Tensor parallelism of latent attention: gather the latents of all tokens, for the heads here.

Between the gathering and the products of the heads, latents are plain tensors, equal on all ranks, and each rank has
the part of their gradient that comes from its heads. The parts are summed once, by the gathering's reduce-scatter.
Shared experts read gathered tokens in the same way.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle


class GatherLatents(ParallelStyle):
    """Style of a module that returns its input: shards of the tokens are gathered."""

    def __init__(self, shards: Placement):
        super().__init__()
        self._shards = shards

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gather: Any = partial(self._gather, (self._shards,))
        return distribute_module(module, device_mesh, output_fn=gather)

    @staticmethod
    def _gather(shards: tuple[Placement], module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        sharded = DTensor.from_local(output, mesh, shards, run_check=False)
        return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class ColumnsOfGathered(ColwiseParallel):
    """Column-parallel, with an input whose gradient stays the part of this rank; torch's style would sum the parts."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> DTensor:
        replicated: DTensor = _Replicated.apply(inputs[0], device_mesh)  # type: ignore[no-untyped-call]
        return replicated


class _Replicated(torch.autograd.Function):
    """A replicated DTensor; `from_local` sums the parts of its gradient, and only newer torch can be told not to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None]:
        # the compiler first runs it on a gradient that is placed as the output
        assert torch.compiler.is_compiling() or gradient.placements == (Partial(),), gradient.placements
        return gradient.to_local(), None
