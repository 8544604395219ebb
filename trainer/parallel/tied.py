"""Tied embeddings across pipeline stages: two copies of one parameter, one gradient."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from converters.families.base import ModelArgs
from trainer.mesh import Meshes


class TiedCopies:
    """The embedding on the first stage and the output on the last are the same numbers; both are updated alike.

    In one stage they are one parameter, and there is nothing to do here.
    """

    def __init__(self, args: ModelArgs, parts: Sequence[nn.Module], meshes: Meshes):
        self.copies: list[nn.Parameter] = []  # held here, and by the first stage
        self._shared: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        if not args.tied or meshes.dims.pp == 1:
            return
        self._group = _group_of_ends(meshes)
        for part in parts:
            if part.tok_embeddings is not None:
                self._shared.append(part.tok_embeddings.weight)
            if part.output is not None:
                self._shared.append(part.output.weight)
                self.copies.append(part.output.weight)

    def sum_gradients(self) -> None:
        """Sum over the two stages. Both hold the same shard of it, so local tensors are all that meets."""
        for parameter in self._shared:
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._group)


def _group_of_ends(meshes: Meshes) -> dist.ProcessGroup:
    """The first and the last rank of this rank's pipeline. Every rank takes part in making every such group."""
    if meshes.dims.pp == 2:
        return meshes["pp"].get_group()
    grid = meshes.parameters.mesh.flatten(1)  # [pp, ranks of a stage]
    groups = [dist.new_group([first, last]) for first, last in zip(grid[0].tolist(), grid[-1].tolist(), strict=True)]
    return groups[grid.eq(dist.get_rank()).nonzero()[0, 1]]
