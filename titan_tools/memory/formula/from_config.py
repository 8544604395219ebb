"""From the config that `titan train` takes to the numbers that the closed form needs."""

from converters.dtypes import itemsize
from converters.families.registry import get_family
from titan_tools.memory.formula.run_shape import Float8Products, Recompute, RunShape
from titan_tools.memory.layout import resolved_layout
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.loss.registry import CHUNKED, is_loss_parallel
from trainer.parallel.compile import compiles
from trainer.parallel.float8 import is_float8
from trainer.parallel.fsdp import is_fsdp
from trainer.stages import split_model


def run_shape(config: Config, *, world_size: int | None = None, problems: list[str] | None = None) -> RunShape:
    """The run that a config describes on `world_size` ranks (None: what its degrees name).

    Raises ConfigError with everything that cannot be, `problems` of the caller included. Whether the closed form has a
    say in it is coverage.py's to tell.
    """
    dims = resolved_layout(config, world_size=world_size, problems=problems)
    args = get_family(config.model.name).flavors[config.model.flavor]
    training, parallelism = config.training, config.parallelism
    reshard = parallelism.fsdp_reshard_after_forward
    microbatch = parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    per_pass = training.local_batch_size * dims.batch
    return RunShape(
        family=get_family(config.model.name),
        args=args,
        mesh=dims,
        uses_fsdp=is_fsdp(config, dims),
        stages=split_model(parallelism, args.num_layers, dims.pp).modules,
        schedule=parallelism.pipeline_parallel_schedule,
        microbatch_size=microbatch,
        num_microbatches=training.local_batch_size // microbatch,
        num_accumulated=max(training.global_batch_size // per_pass, 1),
        seq_len=training.seq_len,
        param_bytes=itemsize(training.dtype),
        compute_bytes=itemsize(training.mixed_precision_param),
        moment_bytes=itemsize(config.optimizer.state_dtype or training.dtype),
        keeps_scores=training.mixed_precision_param == "float32" and args.num_heads != args.num_kv_heads,
        is_offloaded=training.enable_cpu_offload,
        recompute=_recompute(config.activation_checkpoint),
        optimizer=config.optimizer.implementation,
        reshard_after_forward={"default": dims.pp == 1, "always": True, "never": False}[reshard],
        reshard_output=reshard == "always",
        loss_parallel=is_loss_parallel(parallelism, dims),
        loss_chunks=training.loss_chunks if training.loss == CHUNKED else 0,
        validation_samples=_validation_samples(config, microbatch),
        validation_seq_len=config.validation.seq_len,
        compiles_model=compiles(config.compile, "model"),
        compiles_loss=compiles(config.compile, "loss"),
        float8=_float8(config, is_tied=args.tied),
    )


def _float8(config: Config, *, is_tied: bool) -> Float8Products | None:
    if not is_float8(config.model):
        return None
    is_named = any(part in "output" for part in config.float8.filter_fqns)
    return Float8Products(
        converts_output=not is_named and not is_tied, gathers=config.float8.enable_fsdp_float8_all_gather
    )


def _recompute(settings: ActivationCheckpoint) -> Recompute:
    if settings.mode in ("none", "memory_budget"):  # what the compiler recomputes within its budget is not known here
        return Recompute(mode="none")
    if settings.mode == "full":
        return Recompute(mode="full", stops_early=settings.early_stop)
    if settings.selective_ac_option == "op":
        return Recompute(mode="op", stops_early=settings.early_stop)
    return Recompute(mode="full", every=int(settings.selective_ac_option), stops_early=settings.early_stop)


def _validation_samples(config: Config, microbatch: int) -> int:
    """Samples of one forward of validation; none where it is off."""
    if not config.validation.enable:
        return 0
    return microbatch if config.parallelism.pipeline_parallel_degree > 1 else config.validation.local_batch_size
