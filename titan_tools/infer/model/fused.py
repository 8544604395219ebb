"""Linear layers over one input as one product: fewer, larger reads of weights, and fewer launches on a GPU.

The first layer of a group computes for all and keeps the others' parts, which come for them with the same input. One
that comes with another input gets the right answer as well, only slower.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class FusedLinear(nn.Module):
    """Stands in the place of the first layer of a group; `weight` [sum of sizes, K] and `bias` hold the rows of all."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, sizes: Sequence[int]):
        """`sizes`: rows of each layer."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.sizes = tuple(sizes)
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self._input, self._parts = x, self._products(x)
        return self._parts[0]

    def part(self, number: int, x: Tensor) -> Tensor:
        """What layer `number` of the group makes of `x`. The last one to come clears what was kept."""
        if x is not self._input:
            return self._products(x)[number]
        part = self._parts[number]
        if number == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return part

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)


class FusedPart(nn.Module):
    """Stands in the place of a later layer of a group."""

    def __init__(self, fused: FusedLinear, number: int):
        super().__init__()
        self._fused = (fused,)  # in a tuple it is no child: its weight is the first layer's
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self._fused[0].part(self.number, x)


def can_fuse(layers: Sequence[nn.Module]) -> bool:
    """Whether layers over one input are plain linear ones, all with a bias or all without."""
    return all(type(layer) is nn.Linear for layer in layers) and len({layer.bias is None for layer in layers}) == 1


def fuse(parent: nn.Module, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Make the layers `names` of `parent`, which have `sizes` rows here, one product. Its parameters are to be set."""
    first, num_rows = parent.get_submodule(names[0]), sum(sizes)
    weight = nn.Parameter(first.weight.new_empty(num_rows, first.in_features), requires_grad=False)
    bias = None if first.bias is None else nn.Parameter(first.bias.new_empty(num_rows), requires_grad=False)
    fused = FusedLinear(weight, bias, sizes)
    setattr(parent, names[0], fused)
    for number, name in enumerate(names[1:], start=1):
        setattr(parent, name, FusedPart(fused, number))
