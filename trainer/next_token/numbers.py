"""Numbers of a job that predicts the next token: its documents, chunks of the loss, FLOPs. Torch-free."""

from math import ceil

from converters.families.args import DecoderArgs
from trainer.data.sample import DocumentRules
from trainer.job.record import Job
from trainer.loss.registry import is_loss_parallel, num_loss_chunks
from trainer.parallel.compile import compiles
from trainer.parallel.document_mask import document_rules


def documents_of(job: Job) -> DocumentRules:
    """The treatment of documents in samples and attention."""
    return document_rules(job.config, job.family)


def loss_chunks(job: Job) -> int:
    """Number of chunks of the chunked loss in one forward pass."""
    config, dims = job.config, job.dims
    return num_loss_chunks(
        config.training.loss_chunks,
        num_tokens=_forward_tokens(job),
        num_columns=job.decoder.vocab_size // (dims.tp if is_loss_parallel(config.parallelism, dims) else 1),
        is_compiled=compiles(config.compile, "loss"),
    )


def chunk_tokens(job: Job) -> int:
    """Number of tokens of one of these chunks."""
    return ceil(_forward_tokens(job) / loss_chunks(job))


def _forward_tokens(job: Job) -> int:
    """Number of tokens of one forward pass on a context rank."""
    return job.microbatch_size * job.config.training.seq_len // job.dims.cp


def flops_per_token(args: DecoderArgs, *, num_parameters: int, seq_len: int, value_dim: int | None = None) -> int:
    """6·N + 6·L·(d + v)·s: forward and backward of the matrix products, and of full (not causal) attention.

    d and v are the features of all heads of q and of v; v's are as many unless `value_dim` says how many a head has.
    N is `num_parameters` (of a mixture of experts the active ones) without the input embedding, which is a lookup,
    unless it is tied and so the output projection too. Published MFU figures (torchtitan, NVIDIA's benchmarks) use this
    count.
    """
    num_matmul = num_parameters - (0 if args.tied else args.vocab_size * args.dim)
    of_a_head = args.head_dim + (value_dim or args.head_dim)
    return 6 * num_matmul + 6 * args.num_layers * args.num_heads * of_a_head * seq_len
