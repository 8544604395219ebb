"""What a job that predicts the next token cannot be: sequences, documents, data, losses. Torch-free."""

from converters.families.rope import DynamicRope
from converters.layout.mesh_shape import MeshShape
from trainer.data.kinds import data_problems
from trainer.job.record import Job, nearest_multiples
from trainer.loss.registry import is_loss_parallel, loss_problems
from trainer.models.registry import get_trainer_family
from trainer.next_token.numbers import loss_chunks
from trainer.parallel.compile import compiles
from trainer.parallel.document_mask import document_problems
from trainer.parallel.float8 import float8_problems, is_float8
from trainer.parallel.fsdp import is_fsdp


def problems(job: Job) -> list[str]:
    """Everything about data, sequences and loss that does not fit, with the nearest values that do."""
    config, family, args, dims = job.config, job.family, job.decoder, job.dims
    training, parallelism = config.training, config.parallelism
    return [
        *(
            float8_problems(
                config.float8,
                training,
                args,
                dims,
                microbatch_size=job.microbatch_size,
                loss_chunks=loss_chunks(job),
                compiles_model=compiles(config.compile, "model"),
                uses_fsdp=is_fsdp(training, parallelism, config.float8, dims),
            )
            if is_float8(config.model)
            else ()
        ),
        *_sequence_problems(job),
        *data_problems(training, config.validation, dims),
        *document_problems(config, family, args, dims, takes_documents=get_trainer_family(family.name).takes_documents),
        *loss_problems(
            training.loss,
            dims,
            is_loss_parallel=is_loss_parallel(parallelism, dims),
            compiles_loss=compiles(config.compile, "loss"),
            schedule=parallelism.pipeline_parallel_schedule,
        ),
    ]


def _sequence_problems(job: Job) -> list[str]:
    config, args, dims = job.config, job.decoder, job.dims
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
