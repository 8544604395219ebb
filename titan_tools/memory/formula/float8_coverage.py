"""What of float8 the closed form says nothing of, with the reason."""

from dataclasses import replace

from converters.families.registry import get_family
from converters.layout import MeshShape
from trainer.config.sections import Config
from trainer.parallel.compile import compiles
from trainer.parallel.float8 import is_float8, weight_shapes


def float8_gaps(config: Config, dims: MeshShape) -> dict[str, bool]:
    """Reasons, each with whether the config asks for that."""
    if not is_float8(config.model):
        return {}
    settings, is_compiled = config.float8, compiles(config.compile, "model")
    return {
        f"quantize.linear.float8.recipe_name = {settings.recipe_name!r}: scales for rows make other copies": (
            settings.recipe_name not in (None, "tensorwise")
        ),
        "quantize.linear.float8.emulate: it computes in high precision what it casts": settings.emulate,
        "quantize.linear.float8: some of a block's products are not in float8": _leaves_some(config, dims),
        "quantize.linear.float8 without compile under tensor parallelism: what moves in float8 is not written down": (
            not is_compiled and dims.tp > 1
        ),
        "quantize.linear.float8 and compiled blocks that keep what backward reads, with weights in float8 from the"
        " all-gather, or under tensor parallelism: the compiler keeps float8 copies of whole weights, or not, as it"
        " comes cheaper": (
            is_compiled and _keeps_whole_blocks(config) and (settings.enable_fsdp_float8_all_gather or dims.tp > 1)
        ),
    }


def _leaves_some(config: Config, dims: MeshShape) -> bool:
    """By name, by torchao's choice, or as their sizes on a rank are no multiples of 16."""
    family, filters = get_family(config.model.name), config.float8.filter_fqns
    parameters = family.parameters(replace(family.flavors[config.model.flavor], num_layers=1))
    shapes = weight_shapes([p for p in parameters if p.layer is not None], dims.tp)
    is_named = any(part in module for part in filters for module in shapes)
    is_uneven = any(size % 16 for shape in shapes.values() for size in shape)
    return is_named or "auto_filter_small_kn" in filters or is_uneven


def _keeps_whole_blocks(config: Config) -> bool:
    """Also of blocks between those that every n-th is checkpointed of."""
    settings = config.activation_checkpoint
    is_every_nth = settings.mode == "selective" and settings.selective_ac_option not in ("op", "1")
    return settings.mode == "none" or is_every_nth
