"""The distributions of a model's initial weights. Torch-free: seed checkpoints are written without torch."""

from dataclasses import dataclass
from math import sqrt

from converters.families.args import ModelArgs, is_tied
from converters.families.parameters import Parameter, Role

_STD = 0.02


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal around 0; values beyond `cut` standard deviations are drawn again."""

    std: float
    cut: float | None = None


Distribution = Constant | Normal


def initial_distribution(parameter: Parameter, args: ModelArgs) -> Distribution:
    """The distribution of a parameter's initial values, as in torchtitan.

    A tied embedding is drawn like the output projection: as an embedding (std 1) its logits would start √dim wide.
    """
    if parameter.is_bias:
        return Constant(0.0)
    match parameter.role:
        case Role.NORM | Role.HEAD_NORM | Role.LATENT_NORM:
            return Constant(0.0 if parameter.is_offset else 1.0)
        case Role.ROUTER_BIAS:
            return Constant(0.0)
        case Role.EMBEDDING if not is_tied(args):
            return Normal(1.0)
        case Role.EMBEDDING | Role.OUTPUT:
            return Normal(parameter.shape[1] ** -0.5, cut=3.0)
        case Role.ROW | Role.UP_COLUMN | Role.EXPERT_ROW | Role.EXPERT_UP_COLUMN | Role.ROUTER if (
            parameter.depth is not None
        ):
            return _of_depth(parameter.depth)
    return Normal(_STD)


def gpt_oss_distribution(parameter: Parameter, args: ModelArgs) -> Distribution:
    """The distribution of torchtitan's GPT-OSS: the depth scales every matrix of a layer, and its sinks.

    Biases are 0, as in other families and in transformers; torchtitan draws them like the matrices.
    """
    distribution = initial_distribution(parameter, args)
    if parameter.depth is None or isinstance(distribution, Constant):
        return distribution
    return _of_depth(parameter.depth)


def _of_depth(depth: int) -> Normal:
    """Deeper layers add to a residual stream that has already grown."""
    return Normal(_STD / sqrt(2 * (depth + 1)))
