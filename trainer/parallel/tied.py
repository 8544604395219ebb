"""Tied embeddings across pipeline stages: two copies of a parameter with the same gradient and update."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from converters.families.args import ModelArgs, is_tied
from converters.families.parameters import EMBEDDING, OUTPUT
from trainer.models.units import ModelPart
from trainer.optim.clip import local_gradient
from trainer.parallel.stages import StageSplit
from trainer.ranks.mesh import Meshes, local_part


class TiedCopies:
    """Keeps the embedding of the first stage and the output of the last equal.

    With stages on different ranks each updates its copy with the summed gradient. With both on one rank (V-shaped
    schedules) the output is a copy that is not in the optimizer: its gradient is added to the embedding's, and its
    values are copied from it before use. In a single stage they are one parameter, and nothing is done.
    """

    def __init__(
        self, args: ModelArgs, parts: Sequence[ModelPart], meshes: Meshes, *, first_and_last_on_one_rank: bool
    ):
        self.copies: list[nn.Parameter] = []  # updated here and on the rank of the first stage
        self.followers: list[nn.Parameter] = []  # copies of a parameter of this rank
        self._shared: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        if not is_tied(args) or meshes.dims.pp == 1:
            return
        named = [pair for part in parts for pair in part.named_parameters()]
        embeddings, outputs = ([p for name, p in named if name == fqn] for fqn in (EMBEDDING, OUTPUT))
        self._shared = embeddings + outputs
        if first_and_last_on_one_rank:
            self.followers = outputs
        else:
            self.copies, self._group = outputs, _group_of_ends(meshes)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current values to the followers."""
        for follower in self.followers:
            local_part(follower).copy_(local_part(self._shared[0]))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of both stages, which hold the same shard of it."""
        for follower in self.followers:
            local_gradient(self._shared[0]).add_(local_gradient(follower))
            follower.grad = None
        if self._group is not None:
            for parameter in self._shared:
                dist.all_reduce(local_gradient(parameter), group=self._group)


def has_group_of_ends(args: ModelArgs, split: StageSplit, pp_rank: int) -> bool:
    """Whether this pipeline rank sums the embedding's gradient over a group other than pp's, which two ranks use."""
    is_end = pp_rank in (split.ranks[0], split.ranks[-1])
    return is_tied(args) and is_end and not split.first_and_last_on_one_rank and max(split.ranks) > 1


def native_name(name: str, args: ModelArgs) -> str:
    """The FQN of a parameter of a stage's module: that of a tied output is the embedding's."""
    return EMBEDDING if is_tied(args) and name == OUTPUT else name


def _group_of_ends(meshes: Meshes) -> dist.ProcessGroup:
    """The first and the last rank of this rank's pipeline. All ranks must create all these groups."""
    if meshes.dims.pp == 2:
        return meshes["pp"].get_group()
    grid = meshes.parameters.mesh.flatten(1)  # [pp, ranks of a stage]
    groups = [dist.new_group([first, last]) for first, last in zip(grid[0].tolist(), grid[-1].tolist(), strict=True)]
    group: dist.ProcessGroup = groups[grid.eq(dist.get_rank()).nonzero()[0, 1]]
    return group
