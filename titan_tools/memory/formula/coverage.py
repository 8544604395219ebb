"""What the closed form says nothing of, with the reason: there the traced train step stands alone."""

from converters.families.registry import get_family
from converters.layout import MeshShape
from titan_tools.memory.formula.float8_coverage import float8_gaps
from trainer.config.sections import Config
from trainer.loss.registry import CHUNKED, PLAIN

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
