"""Degrees of parallelism: taken from the config, fitted to a world size, checked against model and batch. Torch-free.

Every problem of a layout is told at once, each with the nearest choices that would do.
"""

from dataclasses import asdict

from converters.errors import ConfigError, list_offenders
from converters.families.base import DynamicRope, ModelArgs
from converters.layout import MeshShape, uneven_over_tp
from trainer.checkpoints.problems import checkpoint_problems
from trainer.config.sections import Config, Parallelism, Training
from trainer.data.kinds import data_problems
from trainer.loss.registry import loss_problems
from trainer.parallel.activation_checkpoint import activation_checkpoint_problems
from trainer.parallel.async_tensor import async_tensor_problems
from trainer.parallel.compile import compile_problems
from trainer.parallel.float8 import float8_problems
from trainer.parallel.fsdp import offload_problems
from trainer.stages import stage_problems
from trainer.watching.profiling import profiling_problems


def sequence_divisor(dims: MeshShape) -> int:
    """What divides a sequence length: sequence parallelism cuts it tp times, head-tail sharding 2·cp times."""
    return dims.tp * (2 * dims.cp if dims.cp > 1 else 1)


def required_world_size(parallelism: Parallelism) -> int:
    """Ranks that the config's degrees need; a shard degree of -1 ("the rest") counts as 1."""
    return _fixed_degrees(parallelism) * max(parallelism.data_parallel_shard_degree, 1)


def resolve(parallelism: Parallelism, world_size: int, *, option: str = "--nproc") -> MeshShape:
    """The degrees for `world_size` ranks, which `option` sets. Raises ConfigError where they make another number."""
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
    )
    if dims.world_size != world_size:
        product = " × ".join(f"{axis} {degree}" for axis, degree in asdict(dims).items() if degree > 1) or "dp_shard 1"
        if parallelism.data_parallel_shard_degree == -1:
            near = sorted({max(world_size // fixed, 1) * fixed, (world_size // fixed + 1) * fixed})
            raise ConfigError(
                f"{world_size} ranks cannot be shared out: the degrees but dp_shard multiply to {fixed}",
                hint=f"world sizes near it that fit: {', '.join(map(str, near))}",
            )
        shareable = world_size % fixed == 0
        raise ConfigError(
            f"the mesh needs {dims.world_size} ranks ({product}), but there are {world_size}",
            hint=f"parallelism.data_parallel_shard_degree = {world_size // fixed} would fit, or -1: all that are left"
            if shareable
            else "",
            tries=[f"{option} {dims.world_size}"],
        )
    return dims


def _fixed_degrees(parallelism: Parallelism) -> int:
    return (
        parallelism.pipeline_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
    )


def fit_layout(config: Config, args: ModelArgs, world_size: int, *, option: str = "--world-size") -> MeshShape:
    """The degrees on `world_size` ranks. Raises ConfigError with every problem of their product and of the layout."""
    parallelism = config.parallelism
    try:
        dims = resolve(parallelism, world_size, option=option)
    except ConfigError as error:
        named = resolve(parallelism, required_world_size(parallelism))
        more = layout_problems(config, args, named)
        if not more:
            raise
        first = error.message + (f" ({error.hint})" if error.hint else "")
        told = f"this layout cannot run {config.model.flavor!r}:" + list_offenders([first, *more], most=50)
        raise ConfigError(told, tries=error.tries) from None
    check_layout(config, args, dims)
    return dims


def check_layout(config: Config, args: ModelArgs, dims: MeshShape) -> None:
    """Raise ConfigError with every problem of the layout."""
    problems = layout_problems(config, args, dims)
    if problems:
        raise ConfigError(f"this layout cannot run {config.model.flavor!r}:" + list_offenders(problems, most=50))


def layout_problems(config: Config, args: ModelArgs, dims: MeshShape) -> list[str]:
    """Everything about degrees, model and batch that does not fit, with the nearest choices that would."""
    return [
        *_tensor_problems(args, dims.tp),
        *offload_problems(config, dims),
        *float8_problems(config, args, dims),
        *_sequence_problems(config, args, dims),
        *_batch_problems(config, dims),
        *data_problems(config, dims),
        *loss_problems(config, args, dims),
        *profiling_problems(config, args, dims),
        *checkpoint_problems(config),
        *(stage_problems(config.parallelism, config.training, args.num_layers, dims.pp) if dims.pp > 1 else ()),
        *activation_checkpoint_problems(config, args, dims),
        *compile_problems(config, args, dims),
        *async_tensor_problems(config, args, dims),
    ]


def _tensor_problems(args: ModelArgs, tp: int) -> list[str]:
    uneven = uneven_over_tp(args, tp)
    return [f"parallelism.tensor_parallel_degree = {tp} {uneven}"] if uneven else []


def _sequence_problems(config: Config, args: ModelArgs, dims: MeshShape) -> list[str]:
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len
    divisor = sequence_divisor(dims)
    why = "tp × 2·cp" if dims.cp > 1 else "tp"
    problems = [
        f"{key} = {length} is not a multiple of {divisor} ({why}); nearest: {nearest_multiples(length, divisor)}"
        for key, length in lengths.items()
        if length % divisor
    ]
    if isinstance(args.rope_scaling, DynamicRope):
        problems += [
            f"{key} = {length} is beyond the model's {args.max_seq_len} tokens: there a RoPE of type dynamic changes"
            f" with the length, which is not covered; nearest: {args.max_seq_len // divisor * divisor}"
            for key, length in lengths.items()
            if length > args.max_seq_len
        ]
    return problems


def _batch_problems(config: Config, dims: MeshShape) -> list[str]:
    total, step = config.training.global_batch_size, config.training.local_batch_size * dims.batch
    if total == -1 or total % step == 0:
        return []
    return [
        f"training.global_batch_size = {total} is not a multiple of {step}"
        f" (local_batch_size × data-parallel degree {dims.batch}); nearest: {nearest_multiples(total, step)}"
    ]


def samples_per_step(training: Training, dp_degree: int) -> int:
    """Samples of one step over all ranks; beyond one pass of each rank they are accumulated."""
    size = training.global_batch_size
    return training.local_batch_size * dp_degree if size == -1 else size


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples on either side of a value, as text."""
    below = value // divisor * divisor
    return " or ".join(str(n) for n in (below, below + divisor) if n > 0)
