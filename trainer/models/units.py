"""The units of a model: modules that are gathered, recomputed and compiled at once, and that make pipeline stages."""

from typing import Literal, NamedTuple

from torch import nn

from converters.common.extensions import ExtensionError


class Unit(NamedTuple):
    """A module of a model.

    `place`: in front of the blocks, one of them, or behind them. The last ones are gathered together and stay so for
    backward, which needs them first; an embedding whose weight is the output's is with them.
    """

    name: str  # FQN
    module: nn.Module
    place: Literal["first", "block", "last"] = "block"
    number: int = 0  # of a block among those of the whole model; a pipeline stage has some of them


class ModelPart(nn.Module):
    """A model, or the units of it that a pipeline stage has. Its forward takes the input, and others by name."""

    def units(self) -> list[Unit]:
        """The units that this part has, in the order of forward. Every model lists its own."""
        raise ExtensionError(f"the model {type(self).__name__} has no units(), the list of its modules")

    def tie(self) -> None:
        """Make modules share the parameters that they have in common, after parameters were replaced."""


def blocks_of(model: ModelPart) -> list[Unit]:
    """The blocks among a model's units."""
    return [unit for unit in model.units() if unit.place == "block"]
