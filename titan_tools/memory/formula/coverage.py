"""What the closed form says nothing of, with the reason: there the traced train step stands alone."""

from dataclasses import replace

from converters.families.registry import get_family
from converters.layout import MeshShape
from trainer.config.sections import Config
from trainer.loss.registry import CHUNKED, PLAIN
from trainer.parallel.compile import compiles
from trainer.parallel.float8 import is_float8, weight_shapes

COVERED_FAMILIES = ("llama2", "llama3", "qwen3")  # activations.py is written for their blocks


def formula_gaps(config: Config, dims: MeshShape) -> list[str]:
    """What the config asks for and no formula here describes, each with the reason; empty where all is covered."""
    training, parallelism, checkpointing = config.training, config.parallelism, config.activation_checkpoint
    is_fp32 = training.mixed_precision_param == "float32"
    args = get_family(config.model.name).flavors[config.model.flavor]
    reasons = {
        f"model.name = {config.model.name!r}: covered families: {', '.join(COVERED_FAMILIES)}": (
            config.model.name not in COVERED_FAMILIES
        ),
        f"training.loss = {training.loss!r}: what a function of one's own keeps is only known by running it; chunked"
        " and plain are covered": (training.loss not in (CHUNKED, PLAIN)),
        "training.mixed_precision_param = 'float32' with context parallelism: of grouped queries attention keeps all"
        " scores, and what is there of a context rank's two parts at once is not written down": (
            is_fp32 and dims.cp > 1 and args.num_heads != args.num_kv_heads
        ),
        "training.mixed_precision_param = 'float32' with compile: what the compiler makes of attention in fp32 is not"
        " written down": is_fp32 and config.compile.enable and bool(config.compile.components),
        "training.mixed_precision_param = 'float32' with a larger validation: of grouped queries attention makes all"
        " scores there, which are only counted of training": (
            is_fp32
            and config.validation.enable
            and args.num_heads != args.num_kv_heads
            and (
                config.validation.seq_len > training.seq_len
                or (dims.pp == 1 and config.validation.local_batch_size > training.local_batch_size)
            )
        ),
        f"compile.backend = {config.compile.backend!r}: what another compiler than inductor keeps is not known": (
            config.compile.enable and bool(config.compile.components) and config.compile.backend != "inductor"
        ),
        **float8_gaps(config, dims),
        "activation_checkpoint.mode = memory_budget: the compiler chooses what is recomputed": (
            checkpointing.mode == "memory_budget"
        ),
        "parallelism.enable_async_tensor_parallel: its symmetric buffers are not counted": (
            parallelism.enable_async_tensor_parallel and dims.tp > 1
        ),
    }
    return [reason for reason, is_asked_for in reasons.items() if is_asked_for]


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
