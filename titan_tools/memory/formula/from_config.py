"""From the config that `titan train` takes to the numbers that the engines need; refuses what is not covered."""

from converters.dtypes import itemsize
from converters.errors import ConfigError, UnsupportedError, list_offenders
from converters.families.registry import get_family
from converters.layout import MeshShape
from titan_tools.memory.formula.run_shape import Recompute, RunShape
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.loss.registry import CHUNKED, PLAIN, is_loss_parallel
from trainer.parallel.ddp import is_ddp
from trainer.parallel_dims import layout_problems, required_world_size, resolve
from trainer.stages import SPLIT_BACKWARD_SCHEDULES, split_model

COVERED_FAMILIES = ("llama2", "llama3", "qwen3")  # activations.py is written for their blocks


def run_shape(config: Config, *, world_size: int | None = None, problems: list[str] | None = None) -> RunShape:
    """The run that a config describes on `world_size` ranks (None: what its degrees name).

    Raises ConfigError with everything that cannot be, `problems` of the caller included, and UnsupportedError with
    everything that is not covered.
    """
    args = get_family(config.model.name).flavors[config.model.flavor]
    dims, tries, found = _degrees(config, world_size)
    found = [*(problems or ()), *found, *layout_problems(config, args, dims)]
    if found:
        raise ConfigError(f"nothing was estimated, {_count(found)}:" + list_offenders(found, most=50), tries=tries)
    uncovered = uncovered_by_estimate(config, dims)
    if uncovered:
        raise UnsupportedError(
            "no estimate is given for what is not covered:" + list_offenders(uncovered, most=50),
            hint="a guess would be worse than none",
        )
    training, parallelism = config.training, config.parallelism
    reshard = parallelism.fsdp_reshard_after_forward
    microbatch = parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    per_pass = training.local_batch_size * dims.batch
    return RunShape(
        family=get_family(config.model.name),
        args=args,
        mesh=dims,
        # as in trainer/build.py
        uses_fsdp=dims.fsdp * dims.dp_replicate > 1 or training.mixed_precision_param != training.dtype,
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


def uncovered_by_estimate(config: Config, dims: MeshShape) -> list[str]:
    """What the config asks for and no formula here describes, each with the reason; empty where all is covered."""
    training, parallelism, checkpointing = config.training, config.parallelism, config.activation_checkpoint
    schedule, state_dtype = parallelism.pipeline_parallel_schedule, config.optimizer.state_dtype
    reasons = {
        f"model.name = {config.model.name!r}: covered families: {', '.join(COVERED_FAMILIES)}": (
            config.model.name not in COVERED_FAMILIES
        ),
        f"training.loss = {training.loss!r}: what it keeps is not known; chunked and plain are covered": (
            training.loss not in (CHUNKED, PLAIN)
        ),
        "compile.enable: the compiler fuses operations and chooses what is kept for backward": (
            config.compile.enable and bool(config.compile.components)
        ),
        "model.converters: float8 keeps other copies of activations and weights": bool(config.model.converters),
        "training.enable_cpu_offload: parameters, gradients and states lie in host memory": training.enable_cpu_offload,
        "activation_checkpoint.mode = memory_budget: the compiler chooses what is recomputed": (
            checkpointing.mode == "memory_budget"
        ),
        f"optimizer.state_dtype = {state_dtype!r}: moments are counted in training.dtype, {training.dtype}": (
            state_dtype not in (None, training.dtype)
        ),
        f"parallelism.pipeline_parallel_schedule = {schedule!r}: no order of microbatches is written down here for a"
        " backward that computes gradients of weights apart": (dims.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES),
        f"parallelism.data_parallel_replicate_degree = {dims.dp_replicate} alone (DDP): whole gradients are reduced"
        " beside backward; with data_parallel_shard_degree ≥ 2 (HSDP) it is covered": is_ddp(dims),
        "parallelism.enable_async_tensor_parallel: its symmetric buffers are not counted": (
            parallelism.enable_async_tensor_parallel and dims.tp > 1
        ),
    }
    return [reason for reason, is_asked_for in reasons.items() if is_asked_for]


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
