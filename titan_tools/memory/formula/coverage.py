"""What the closed form does not describe, with the reason: there the traced train step stands alone."""

from dataclasses import replace

from trainer.job.job import Job
from trainer.loss.registry import CHUNKED, PLAIN
from trainer.parallel.compile import compiles
from trainer.parallel.ddp import is_ddp
from trainer.parallel.experts import has_experts
from trainer.parallel.float8 import float8_filters, is_float8, weight_shapes

COVERED_FAMILIES = ("llama2", "llama3", "qwen3")  # activations.py is written for their blocks


def formula_gaps(job: Job) -> list[str]:
    """What the job asks for and no formula describes, each with the reason; empty if everything is covered."""
    config, args, dims = job.config, job.args, job.dims
    training, parallelism, checkpointing = config.training, config.parallelism, config.activation_checkpoint
    is_fp32, is_grouped = training.mixed_precision_param == "float32", args.num_heads != args.num_kv_heads
    is_compiled = config.compile.enable and bool(config.compile.components)
    has_larger_validation = config.validation.enable and (
        config.validation.seq_len > training.seq_len
        or (dims.pp == 1 and config.validation.local_batch_size > training.local_batch_size)
    )
    reasons = {
        f"model.name = {config.model.name!r}: covered families: {', '.join(COVERED_FAMILIES)}": (
            config.model.name not in COVERED_FAMILIES
        ),
        f"model.flavor = {config.model.flavor!r}: what routed tokens keep is not described": has_experts(
            job.family, args
        ),
        f"training.document_mask = {job.documents.mask!r}: attention within documents is not described": (
            job.documents.mask != "none"
        ),
        f"training.loss = {training.loss!r}: what a registered loss keeps is only known by running it; covered: chunked"
        " and plain": training.loss not in (CHUNKED, PLAIN),
        "training.mixed_precision_param = 'float32' with context parallelism: attention with grouped queries keeps all"
        " scores, and how much of a context rank's two parts exists at once is not described": (
            is_fp32 and dims.cp > 1 and is_grouped
        ),
        "training.mixed_precision_param = 'float32' with compile: how the compiler treats attention in fp32 is not"
        " described": is_fp32 and is_compiled,
        "training.mixed_precision_param = 'float32' with a larger validation: attention with grouped queries makes all"
        " scores, which are only counted for training": is_fp32 and is_grouped and has_larger_validation,
        f"training.mixed_precision_reduce = {training.mixed_precision_reduce!r}: casts to it are not described": (
            training.mixed_precision_reduce != (training.dtype if is_ddp(dims) else "float32")
        ),
        f"compile.backend = {config.compile.backend!r}: what a compiler other than inductor keeps is not known": (
            is_compiled and config.compile.backend != "inductor"
        ),
        **(_float8_reasons(job) if is_float8(config.model) else {}),
        "activation_checkpoint.mode = memory_budget: the compiler chooses what is recomputed": (
            checkpointing.mode == "memory_budget"
        ),
        "parallelism.enable_async_tensor_parallel: its symmetric buffers are not counted": (
            parallelism.enable_async_tensor_parallel and dims.tp > 1
        ),
    }
    return [reason for reason, is_asked_for in reasons.items() if is_asked_for]


def _float8_reasons(job: Job) -> dict[str, bool]:
    """Reasons, each with whether the job asks for that."""
    settings, checkpointing = job.config.float8, job.config.activation_checkpoint
    is_compiled, uses_tp = compiles(job.config.compile, "model"), job.dims.tp > 1
    # Also the blocks between those that are checkpointed, every n-th one
    is_every_nth = checkpointing.mode == "selective" and checkpointing.selective_ac_option not in ("op", "1")
    keeps_whole_blocks = checkpointing.mode == "none" or is_every_nth
    return {
        f"quantize.linear.float8.recipe_name = {settings.recipe_name!r}: scales per row make other copies": (
            settings.recipe_name not in (None, "tensorwise")
        ),
        "quantize.linear.float8.emulate: products are computed in high precision": settings.emulate,
        "quantize.linear.float8: some of a block's products are not in float8": _leaves_some(job),
        "quantize.linear.float8 without compile under tensor parallelism: collectives in float8 are not described": (
            not is_compiled and uses_tp
        ),
        "quantize.linear.float8 and compiled blocks without checkpointing, with float8 weights from the all-gather or"
        " under tensor parallelism: the compiler keeps float8 copies of whole weights where that is cheaper": (
            is_compiled and keeps_whole_blocks and (settings.enable_fsdp_float8_all_gather or uses_tp)
        ),
    }


def _leaves_some(job: Job) -> bool:
    """By name, by torchao's choice, or because sizes on a rank are not multiples of 16."""
    filters = float8_filters(job.config.float8, job.config.training)
    parameters = job.family.parameters(replace(job.args, num_layers=1))
    shapes = weight_shapes([p for p in parameters if p.layer is not None], job.dims.tp)
    is_named = any(part in module for part in filters for module in shapes)
    is_uneven = any(size % 16 for shape in shapes.values() for size in shape)
    return is_named or "auto_filter_small_kn" in filters or is_uneven
