"""The job record: config, model numbers, degrees and stage split, resolved and checked once, before anything is built.

Torch-free. Every problem of a layout is reported at once, each with the nearest values that work.
"""

from dataclasses import dataclass
from math import ceil, gcd

from converters.common.errors import ConfigError, list_offenders
from converters.families.base import DynamicRope, Family, ModelArgs
from converters.families.registry import get_family
from converters.layout.mesh_check import uneven_over_tp
from converters.layout.mesh_shape import AXES, MeshShape
from trainer.checkpoints.problems import checkpoint_problems
from trainer.config.sections import Config, Parallelism, Training
from trainer.data.kinds import data_problems
from trainer.data.sample import DocumentRules
from trainer.loss.registry import is_loss_parallel, loss_problems, num_loss_chunks
from trainer.models.registry import get_trainer_family
from trainer.observability.profiling import profiling_problems
from trainer.parallel.activation_checkpoint import activation_checkpoint_problems
from trainer.parallel.async_tensor import async_tensor_problems
from trainer.parallel.compile import compile_problems, compiles
from trainer.parallel.document_mask import document_problems, document_rules
from trainer.parallel.experts import expert_problems
from trainer.parallel.float8 import float8_problems, is_float8
from trainer.parallel.fsdp import is_fsdp, offload_problems
from trainer.parallel.stages import StageSplit, schedule_of, split_model, stage_problems


@dataclass(frozen=True, slots=True)
class Job:
    """A run: the computation, and the layout of its ranks. `resolve_job` makes it and checks it."""

    config: Config
    family: Family
    args: ModelArgs
    dims: MeshShape
    split: StageSplit

    @staticmethod
    def of(config: Config, args: ModelArgs, dims: MeshShape) -> "Job":
        """A job of a layout that was checked before. `args` may differ from the flavor's."""
        family = get_family(config.model.name)
        split = split_model(config.parallelism, family.units(args), dims.pp)
        return Job(config, family, args, dims, split)

    @property
    def seed(self) -> int:
        """Seed of the initial weights and of the data order."""
        return self.config.debug.seed or 0

    @property
    def documents(self) -> DocumentRules:
        """The treatment of documents in samples and attention."""
        return document_rules(self.config, self.family)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self.family.num_parameters(self.args)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token is multiplied with: fewer in a mixture of experts."""
        return self.family.num_active_parameters(self.args)

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return samples_per_step(self.config.training, self.dims.batch)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks, padding included."""
        return self.samples_per_step * self.config.training.seq_len

    @property
    def num_accumulated(self) -> int:
        """Forward and backward passes of one optimizer step (gradient accumulation)."""
        return self.samples_per_step // (self.config.training.local_batch_size * self.dims.batch)

    @property
    def microbatch_size(self) -> int:
        """Samples of one forward pass: a pipeline's microbatch, else the local batch."""
        return _microbatch_size(self.config, self.dims)

    @property
    def loss_chunks(self) -> int:
        """Chunks of the chunked loss in one forward pass."""
        return _loss_chunks(self.config, self.args, self.dims)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one of these chunks."""
        return ceil(_forward_tokens(self.config, self.dims) / self.loss_chunks)

    @property
    def schedule(self) -> str:
        """The pipeline's, which the number of microbatches may change."""
        return schedule_of(self.config.parallelism, num_microbatches=self.num_microbatches, pp=self.dims.pp)

    @property
    def num_microbatches(self) -> int:
        """Microbatches that each pass sends through the pipeline; 1 without a pipeline."""
        return self.config.training.local_batch_size // self.microbatch_size


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
    schedule = parallelism.pipeline_parallel_schedule
    compiles_model = compiles(config.compile, "model")
    return [
        *_tensor_problems(args, dims.tp),
        *expert_problems(config, family, args, dims),
        *offload_problems(training, dims),
        *(
            float8_problems(
                config.float8,
                training,
                args,
                dims,
                microbatch_size=_microbatch_size(config, dims),
                loss_chunks=_loss_chunks(config, args, dims),
                compiles_model=compiles_model,
                uses_fsdp=is_fsdp(training, parallelism, config.float8, dims),
            )
            if is_float8(config.model)
            else ()
        ),
        *_sequence_problems(config, args, dims),
        *_batch_problems(training, dims),
        *data_problems(training, config.validation, dims),
        *document_problems(
            config,
            family,
            args,
            dims,
            takes_documents=get_trainer_family(config.model.name).takes_documents,
        ),
        *loss_problems(
            training.loss,
            dims,
            is_loss_parallel=is_loss_parallel(parallelism, dims),
            compiles_loss=compiles(config.compile, "loss"),
            schedule=schedule,
        ),
        *profiling_problems(config.profiling),
        *checkpoint_problems(config.checkpoint, config.model),
        *(stage_problems(parallelism, training, family.units(args), dims.pp) if dims.pp > 1 else ()),
        *activation_checkpoint_problems(
            config.activation_checkpoint, compiles_model=compiles_model, schedule=schedule if dims.pp > 1 else None
        ),
        *compile_problems(config.compile, schedule=schedule if dims.pp > 1 else None),
        *async_tensor_problems(parallelism, config.compile, tp=dims.tp),
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
            f"{key} = {length} is beyond the model's {args.max_seq_len} tokens: there the frequencies of a RoPE of type"
            f" dynamic depend on the length, which is not supported; nearest: {args.max_seq_len // divisor * divisor}"
            for key, length in lengths.items()
            if length > args.max_seq_len
        ]
    return problems


def sequence_divisor(dims: MeshShape) -> int:
    """A divisor of all sequence lengths: sequence parallelism splits it tp times, head-tail sharding 2·cp times."""
    return dims.tp * (2 * dims.cp if dims.cp > 1 else 1)


def _batch_problems(training: Training, dims: MeshShape) -> list[str]:
    total, step = training.global_batch_size, training.local_batch_size * dims.batch
    if total == -1 or total % step == 0:
        return []
    return [
        f"training.global_batch_size = {total} is not a multiple of {step}"
        f" (local_batch_size × data-parallel degree {dims.batch}); nearest: {nearest_multiples(total, step)}"
    ]


def samples_per_step(training: Training, dp_degree: int) -> int:
    """Samples of one step over all ranks; more than one pass of each rank takes is accumulated."""
    size = training.global_batch_size
    return training.local_batch_size * dp_degree if size == -1 else size


def _microbatch_size(config: Config, dims: MeshShape) -> int:
    return config.parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else config.training.local_batch_size


def _forward_tokens(config: Config, dims: MeshShape) -> int:
    """Tokens of one forward pass on a context rank."""
    return _microbatch_size(config, dims) * config.training.seq_len // dims.cp


def _loss_chunks(config: Config, args: ModelArgs, dims: MeshShape) -> int:
    return num_loss_chunks(
        config.training.loss_chunks,
        num_tokens=_forward_tokens(config, dims),
        num_columns=args.vocab_size // (dims.tp if is_loss_parallel(config.parallelism, dims) else 1),
        is_compiled=compiles(config.compile, "loss"),
    )


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples on either side of a value, as text."""
    return " or ".join(map(str, multiples_near(value, divisor)))


def multiples_near(value: int, divisor: int) -> list[int]:
    """The multiples on either side of a value."""
    below = value // divisor * divisor
    return [n for n in (below, below + divisor) if n > 0]
