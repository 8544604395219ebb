"""Resolve a config and a number of ranks into the job record, and check it, before anything is built.

Torch-free. Every problem of a layout is reported at once, each with the nearest values that work.
"""

from math import gcd

from converters.common.errors import ConfigError, list_offenders
from converters.families.args import ModelArgs
from converters.families.base import Family
from converters.families.registry import get_family
from converters.layout.mesh_check import uneven_over_tp
from converters.layout.mesh_shape import AXES, MeshShape
from trainer.checkpoints.problems import checkpoint_problems
from trainer.config.sections import Config, Parallelism, Training
from trainer.job.record import Job, nearest_multiples
from trainer.models.objectives import get_objective
from trainer.objective import support_problems
from trainer.observability.profiling import profiling_problems
from trainer.parallel.activation_checkpoint import activation_checkpoint_problems
from trainer.parallel.async_tensor import async_tensor_problems
from trainer.parallel.compile import compile_problems, compiles
from trainer.parallel.experts import expert_problems
from trainer.parallel.fsdp import offload_problems
from trainer.parallel.stages import split_model, stage_problems


def resolve_job(
    config: Config, world_size: int | None = None, *, args: ModelArgs | None = None, option: str = "--world-size"
) -> Job:
    """The job of a config on `world_size` ranks; None means as many as its degrees need.

    `args` replaces the numbers of the config's flavor. `option` is the command-line option that sets the world size.
    Raises ConfigError with every problem of the degrees and of the layout.
    """
    args = args or get_family(config.model.name).flavors[config.model.flavor]
    needed = required_world_size(config.parallelism)
    problems, tries = [], []
    try:
        dims = resolve(config.parallelism, world_size or needed, option=option)
    except ConfigError as error:
        dims = resolve(config.parallelism, needed)
        more = layout_problems(config, args, dims)
        if not more:
            raise
        problems, tries = [error.message + (f" ({error.hint})" if error.hint else ""), *more], [*error.tries]
    else:
        problems = layout_problems(config, args, dims)
    if problems:
        raise ConfigError(
            f"this config cannot run {config.model.flavor!r}:" + list_offenders(problems, most=50), tries=tries
        )
    return Job.of(config, args, dims)


def required_world_size(parallelism: Parallelism) -> int:
    """Ranks that the config's degrees need; a shard degree of -1 (all remaining ranks) counts as few as possible.

    That is 1, or as many as expert parallelism needs for its ranks.
    """
    dp_shard = parallelism.data_parallel_shard_degree
    if dp_shard == -1:
        of_experts = parallelism.expert_parallel_degree
        if of_experts > 1:
            of_experts *= parallelism.expert_tensor_parallel_degree
        dp_shard = of_experts // gcd(
            of_experts, parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
        )
    return _fixed_degrees(parallelism) * dp_shard


def resolve(parallelism: Parallelism, world_size: int, *, option: str = "--nproc") -> MeshShape:
    """The degrees for `world_size` ranks, which `option` sets. Raises ConfigError if their product differs."""
    fixed = _fixed_degrees(parallelism)
    dp_shard = parallelism.data_parallel_shard_degree
    if dp_shard == -1:
        dp_shard = world_size // fixed
    dims = MeshShape(
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=dp_shard,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
    )
    if dims.world_size == world_size:
        return dims
    if parallelism.data_parallel_shard_degree == -1:
        near = sorted({max(world_size // fixed, 1) * fixed, (world_size // fixed + 1) * fixed})
        raise ConfigError(
            f"{world_size} ranks do not divide: the degrees other than dp_shard multiply to {fixed}",
            hint=f"nearest world sizes that divide: {', '.join(map(str, near))}",
            tries=[f"{option} {n}" for n in near],
        )
    degrees = {axis: getattr(dims, axis) for axis in AXES}
    product = " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "dp_shard 1"
    hint = ""
    if world_size % fixed == 0:
        hint = (
            f"parallelism.data_parallel_shard_degree = {world_size // fixed} would fit, or -1 for all remaining ranks"
        )
    raise ConfigError(
        f"the mesh needs {dims.world_size} ranks ({product}), but there are {world_size}",
        hint=hint,
        tries=[f"{option} {dims.world_size}"],
    )


def derived_degrees(parallelism: Parallelism) -> list[str]:
    """The degrees by which ranks share the experts, which follow from the others."""
    if parallelism.expert_parallel_degree == 1:
        return []
    if parallelism.data_parallel_shard_degree == -1:
        return ["experts: efsdp = dp_shard × cp × tp / (ep × etp), by the number of ranks"]
    return [f"experts: {resolve(parallelism, required_world_size(parallelism)).of_experts}"]


def _fixed_degrees(parallelism: Parallelism) -> int:
    return (
        parallelism.pipeline_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
    )


def layout_problems(config: Config, args: ModelArgs, dims: MeshShape) -> list[str]:
    """Everything about degrees, model and batch that does not fit, with the nearest values that do."""
    training, parallelism, family = config.training, config.parallelism, get_family(config.model.name)
    units, objective = family.units(args), get_objective(family.name)
    has_stages, schedule = dims.pp > 1, parallelism.pipeline_parallel_schedule
    compiles_model = compiles(config.compile, "model")
    staging = stage_problems(parallelism, training, units, dims.pp) if has_stages else []
    # What cannot be split is looked at as one stage, so that its other problems are reported, too
    job = Job(config, family, args, dims, split_model(parallelism, units, 1 if staging else dims.pp))
    return [
        *_tensor_problems(family, args, dims.tp),
        *expert_problems(config, family, args, dims),
        *offload_problems(training, dims),
        *_batch_problems(training, dims),
        *support_problems(objective, job),
        *objective.problems(job),
        *profiling_problems(config.profiling),
        *checkpoint_problems(config.checkpoint, config.model),
        *staging,
        *activation_checkpoint_problems(
            config.activation_checkpoint, compiles_model=compiles_model, schedule=schedule if has_stages else None
        ),
        *compile_problems(config.compile, schedule=schedule if has_stages else None),
        *async_tensor_problems(parallelism, config.compile, tp=dims.tp),
    ]


def _tensor_problems(family: Family, args: ModelArgs, tp: int) -> list[str]:
    uneven = uneven_over_tp(family, args, tp)
    return [f"parallelism.tensor_parallel_degree = {tp} {uneven}"] if uneven else []


def _batch_problems(training: Training, dims: MeshShape) -> list[str]:
    total, step = training.global_batch_size, training.local_batch_size * dims.batch
    if total == -1 or total % step == 0:
        return []
    return [
        f"training.global_batch_size = {total} is not a multiple of {step}"
        f" (local_batch_size × data-parallel degree {dims.batch}); nearest: {nearest_multiples(total, step)}"
    ]
