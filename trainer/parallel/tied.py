"""Tied embeddings across pipeline stages: two copies of one parameter, one gradient, one update."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from converters.families.base import ModelArgs
from trainer.mesh import Meshes, local_part
from trainer.optim.clip import local_gradient


class TiedCopies:
    """The embedding on the first stage and the output on the last are the same numbers.

    Stages of different ranks: each updates its copy, with the summed gradient. Stages of one rank (V-shaped schedules):
    the output is a copy that no optimizer knows; it lends its gradient and takes the values before they are used. In
    one stage they are one parameter, and there is nothing to do here.
    """

    def __init__(self, args: ModelArgs, parts: Sequence[nn.Module], meshes: Meshes, *, ends_meet: bool):
        self.copies: list[nn.Parameter] = []  # updated here, and by the rank of the first stage
        self.followers: list[nn.Parameter] = []  # of a parameter of this rank
        self._shared: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        if not args.tied or meshes.dims.pp == 1:
            return
        embeddings = [part.tok_embeddings.weight for part in parts if part.tok_embeddings is not None]
        outputs = [part.output.weight for part in parts if part.output is not None]
        self._shared = embeddings + outputs
        if ends_meet:
            self.followers = outputs
        else:
            self.copies, self._group = outputs, _group_of_ends(meshes)

    @torch.no_grad()
    def refresh(self) -> None:
        """Give a follower the values that the optimizer, a checkpoint or the first weights have set."""
        for follower in self.followers:
            local_part(follower).copy_(local_part(self._shared[0]))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum over the two stages. Both hold the same shard of it, so local tensors are all that meets."""
        for follower in self.followers:
            local_gradient(self._shared[0]).add_(local_gradient(follower))
            follower.grad = None
        if self._group is not None:
            for parameter in self._shared:
                dist.all_reduce(local_gradient(parameter), group=self._group)


def _group_of_ends(meshes: Meshes) -> dist.ProcessGroup:
    """The first and the last rank of this rank's pipeline. Every rank takes part in making every such group."""
    if meshes.dims.pp == 2:
        return meshes["pp"].get_group()
    grid = meshes.parameters.mesh.flatten(1)  # [pp, ranks of a stage]
    groups = [dist.new_group([first, last]) for first, last in zip(grid[0].tolist(), grid[-1].tolist(), strict=True)]
    return groups[grid.eq(dist.get_rank()).nonzero()[0, 1]]
