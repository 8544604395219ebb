"""Numbers for what torchtitan v0.2.2 has trained: its Llama 4 differs from the published one."""

from dataclasses import replace

from converters.errors import ConfigError
from converters.families.base import ModelArgs, TrainedOtherwise
from converters.families.llama4 import Llama4Args


def as_torchtitan_trained(args: ModelArgs, *, beyond_original: bool) -> TrainedOtherwise:
    """What v0.2.2 trained. It has neither norms of q and k nor a temperature.

    Its flavors with `irope` leave the rotation out of the first of every so many layers, not of the last. As released
    they fail, because FlexAttention gets the masks of both kinds of layers. Raises ConfigError for `beyond_original`.
    """
    assert isinstance(args, Llama4Args)
    if beyond_original:
        raise ConfigError(
            "--trained-by torchtitan-0.2.2-yarn: Llama 4 has no YaRN", tries=["--trained-by torchtitan-0.2.2"]
        )
    without = args.layers_without_positions
    moved = tuple(layer for layer in range(args.num_layers) if without and layer % (without[0] + 1) == 0)
    trained = replace(args, norms_qk=False, temperature=None, temperature_length=8192, layers_without_positions=moved)
    unsaid = ["masks: v0.2.2 as released fails in layers with chunks; of flavors without irope take their own config"]
    return TrainedOtherwise(
        trained,
        unsaid if without else [],
        "no norms of q and k, no temperature, other layers without positions",
    )
