"""Numbers, parameters and names of the model: blocks of two kinds."""

from dataclasses import dataclass

from converters.api import Family, ModelArgs, Parameter, Role

CHANNELS, PATCH, CLASSES = 3, 4, 5  # values of a patch are CHANNELS · PATCH


@dataclass(frozen=True, slots=True)
class TowersArgs(ModelArgs):
    dim: int
    num_image_blocks: int
    num_condition_blocks: int
    num_heads: int
    hidden: int  # features inside of a feed-forward


def linear(fqn, rows, columns):
    return [
        Parameter(f"{fqn}.weight", (rows, columns), Role.COLUMN),
        Parameter(f"{fqn}.bias", (rows,), Role.COLUMN, is_bias=True),
    ]


def parameters(args):
    dim, hidden = args.dim, args.hidden
    found = [*linear("patches", dim, CHANNELS * PATCH), *linear("condition", dim, CLASSES + 1)]
    for n in range(args.num_condition_blocks):
        block = f"condition_blocks.{n}"
        found += [*linear(f"{block}.up", hidden, dim), *linear(f"{block}.down", dim, hidden)]
    for n in range(args.num_image_blocks):
        block = f"image_blocks.{n}"
        found += [Parameter(f"{block}.norm.weight", (dim,), Role.NORM)]
        found += [*linear(f"{block}.qkv", 3 * dim, dim), *linear(f"{block}.out", dim, dim)]
        found += [*linear(f"{block}.up", hidden, dim), *linear(f"{block}.down", dim, hidden)]
    return [*found, Parameter("norm.weight", (dim,), Role.NORM), *linear("head", CHANNELS * PATCH, dim)]


ARGS = TowersArgs(dim=32, num_image_blocks=3, num_condition_blocks=2, num_heads=4, hidden=64)
TOWERS = Family(name="towers", flavors={"tiny": ARGS}, parameters=parameters, args_type=TowersArgs)
