"""From the config that `titan train` takes to the numbers that the closed form needs."""

from converters.dtypes import itemsize
from converters.errors import ConfigError, list_offenders
from converters.families.registry import get_family
from converters.layout import MeshShape
from titan_tools.memory.formula.run_shape import Recompute, RunShape
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.loss.registry import CHUNKED, is_loss_parallel
from trainer.parallel.fsdp import is_fsdp
from trainer.parallel_dims import layout_problems, required_world_size, resolve
from trainer.stages import split_model


def run_shape(config: Config, *, world_size: int | None = None, problems: list[str] | None = None) -> RunShape:
    """The run that a config describes on `world_size` ranks (None: what its degrees name).

    Raises ConfigError with everything that cannot be, `problems` of the caller included. Whether the closed form has a
    say in it is coverage.py's to tell.
    """
    args = get_family(config.model.name).flavors[config.model.flavor]
    dims, tries, found = _degrees(config, world_size)
    found = [*(problems or ()), *found, *layout_problems(config, args, dims)]
    if found:
        raise ConfigError(f"nothing was estimated, {_count(found)}:" + list_offenders(found, most=50), tries=tries)
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
        recompute=_recompute(config.activation_checkpoint),
        optimizer=config.optimizer.implementation,
        reshard_after_forward={"default": dims.pp == 1, "always": True, "never": False}[reshard],
        reshard_output=reshard == "always",
        loss_parallel=is_loss_parallel(config, dims),
        loss_chunks=training.loss_chunks if training.loss == CHUNKED else 0,
        validation_samples=_validation_samples(config, microbatch),
        validation_seq_len=config.validation.seq_len,
    )


def _degrees(config: Config, world_size: int | None) -> tuple[MeshShape, list[str], list[str]]:
    """The degrees, or near ones and why they are not what was asked for, with what to try."""
    parallelism = config.parallelism
    needed = required_world_size(parallelism)
    if world_size is None and parallelism.data_parallel_shard_degree == -1:
        why = (
            "the number of ranks is open: parallelism.data_parallel_shard_degree = -1 takes the ranks that the other"
            f" degrees leave; give --world-size, a multiple of {needed}"
        )
        return resolve(parallelism, needed), [f"--world-size {max(needed, 8)}"], [why]
    try:
        return resolve(parallelism, world_size or needed), [], []
    except ConfigError as error:
        multiples = sorted({max(world_size // needed, 1) * needed, (world_size // needed + 1) * needed})
        fitting = multiples if parallelism.data_parallel_shard_degree == -1 else [needed]
        near = ", ".join(f"--world-size {n}" for n in fitting)
        return (
            resolve(parallelism, needed),
            [f"--world-size {n}" for n in fitting],
            [f"{error.message}; nearest: {near}"],
        )


def _recompute(settings: ActivationCheckpoint) -> Recompute:
    if settings.mode != "selective":
        return Recompute(mode=settings.mode)
    if settings.selective_ac_option == "op":
        return Recompute(mode="op", stops_early=settings.early_stop)
    return Recompute(mode="full", every=int(settings.selective_ac_option))


def _validation_samples(config: Config, microbatch: int) -> int:
    """Samples of one forward of validation; none where it is off."""
    if not config.validation.enable:
        return 0
    return microbatch if config.parallelism.pipeline_parallel_degree > 1 else config.validation.local_batch_size


def _count(problems: list[str]) -> str:
    return "one thing cannot be" if len(problems) == 1 else f"{len(problems)} things cannot be"
