"""Numbers for what torchtitan v0.2.2 has trained: its Llama 4 differs from the published one."""

from dataclasses import replace

from converters.common.errors import ConfigError
from converters.families.foreign import TrainedOtherwise
from converters.families.llama4 import Llama4Args


def as_torchtitan_trained(args: Llama4Args, *, beyond_original: bool) -> TrainedOtherwise:
    """What v0.2.2 trained. It has neither norms of q and k nor a temperature.

    Its flavors with `irope` leave the rotation out of the first of every so many layers, not of the last. As released
    they fail, because FlexAttention gets the masks of both kinds of layers. Numbers that say so already are kept.
    Raises ConfigError for `beyond_original`, and for layers without positions that are neither.
    """
    if beyond_original:
        raise ConfigError(
            "--trained-by torchtitan-0.2.2-yarn: Llama 4 has no YaRN", tries=["--trained-by torchtitan-0.2.2"]
        )
    without = args.layers_without_positions
    first = _first_of_steps(without, args.num_layers)
    trained = replace(args, norms_qk=False, temperature=None, temperature_length=8192, layers_without_positions=first)
    unsaid = ["masks: v0.2.2 as released fails in layers with chunks; of flavors without irope take their own config"]
    return TrainedOtherwise(
        trained,
        unsaid if without else [],
        "no norms of q and k, no temperature, other layers without positions",
    )


def _first_of_steps(without: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The first of every so many layers, where `without` are those or the last ones. Raises ConfigError for others."""
    if not without:
        return ()
    step = without[0] + 1
    if without == tuple(range(step - 1, num_layers, step)):
        return tuple(range(0, num_layers, step))
    step = (*without, num_layers)[1]
    if without == tuple(range(0, num_layers, step)):
        return without
    raise ConfigError(
        f"--trained-by torchtitan-0.2.2: layers without positions {list(without)} of {num_layers}: in v0.2.2 "
        "they are the first of every so many layers, in published models the last",
        hint="give the model that was trained with --model-from; it says them in no_rope_layers of config.json",
    )
