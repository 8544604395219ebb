"""What of float8 the closed form says nothing of, with the reason."""

from converters.families.registry import get_family
from converters.layout import MeshShape
from trainer.config.sections import Config
from trainer.parallel.compile import compiles
from trainer.parallel.float8 import is_float8

_LINEARS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
_LINEARS += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


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
    args = get_family(config.model.name).flavors[config.model.flavor]
    heads, keys = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    sizes = (args.dim, args.ffn_hidden // dims.tp, heads // dims.tp, keys // dims.tp)
    is_named = any(part in f"layers.0.{name}" for part in config.float8.filter_fqns for name in _LINEARS)
    return is_named or "auto_filter_small_kn" in config.float8.filter_fqns or any(size % 16 for size in sizes)


def _keeps_whole_blocks(config: Config) -> bool:
    """Also of blocks between those that every n-th is checkpointed of."""
    settings = config.activation_checkpoint
    is_every_nth = settings.mode == "selective" and settings.selective_ac_option not in ("op", "1")
    return settings.mode == "none" or is_every_nth
