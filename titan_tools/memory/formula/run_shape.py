"""The numbers of a run that the closed form needs: model, mesh, stages, batch, dtypes."""

from dataclasses import dataclass, field
from typing import Literal

from converters.common.dtypes import itemsize
from converters.families.base import Family, ModelArgs, Role
from converters.layout.mesh_shape import MeshShape
from titan_tools.memory.schedules import allocates_on_receipt
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.job.job import Job
from trainer.loss.registry import ALL_FORWARD_FIRST, CHUNKED, is_loss_parallel
from trainer.parallel.compile import compiles
from trainer.parallel.float8 import float8_filters, is_float8
from trainer.parallel.fsdp import computes_in_copies, is_fsdp, keeps_gathered, sums_at_once

FP32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which blocks recompute what in backward. With mode "full", every `every`-th block is checkpointed."""

    mode: Literal["none", "full", "op"]
    every: int = 1
    stops_early: bool = True  # recomputation ends with what backward reads, else it runs to the block's end


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Products:
    """The blocks' products are in float8, with a scale per tensor."""

    converts_output: bool  # the output projection too
    gathers: bool  # FSDP gathers these weights as float8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """One run. `stages` has the module names of each pipeline stage."""

    family: Family
    args: ModelArgs
    mesh: MeshShape
    uses_fsdp: bool  # FSDP2 wraps the model (also as HSDP), or one rank computes in copies
    stages: tuple[tuple[str, ...], ...]
    schedule: str
    microbatch_size: int  # samples of one forward
    num_microbatches: int  # forwards of one pipeline step (1 without a pipeline)
    num_accumulated: int  # passes whose gradients are summed before the optimizer steps
    seq_len: int
    param_bytes: int  # of one element of a parameter and its gradient
    compute_bytes: int  # of one element of an activation or a gathered parameter
    recompute: Recompute
    optimizer: Literal["for-loop", "foreach", "fused"]
    reshard_after_forward: bool
    reshard_output: bool  # norm and output too, which backward needs first
    loss_parallel: bool
    loss_chunks: int  # pieces in which output and loss are computed; 0: plain, on whole logits
    validation_samples: int = 0  # of one forward without gradients; 0: no validation
    validation_seq_len: int = 0
    moment_bytes: int | None = None  # of one element of an optimizer's moment; None: as param_bytes
    keeps_scores: bool = False  # attention is plain products, as CUDA's is in fp32 with grouped queries
    is_offloaded: bool = False  # parameters, gradient shards and moments are in host memory
    compiles_model: bool = False  # each block, with Inductor
    compiles_loss: bool = False
    float8: Float8Products | None = None
    uses_copies: bool = False  # one rank casts its weights as FSDP2, but reduces nothing: trainer/parallel/one_rank.py
    splits_keys: bool = False  # context parallel: cuDNN attends to the keys before a chunk and to its own separately
    keeps_buffers: bool = True  # stages keep a buffer for each receive, and what they sent: torch before 2.15
    sums_at_once: bool = False  # FSDP adds a gradient to its fp32 sum when it is made: from torch 2.15 on
    cpu_attention: bool = False  # a CPU's kernels: context parallel's masks are tensors, and no buffers in backward
    has_head_norms: bool = field(init=False)  # every head of q and k is normalized before attention

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_head_norms", self.family.has_role(Role.HEAD_NORM, self.args))

    @property
    def state_bytes(self) -> int:
        """Of both moments of one element of a parameter."""
        return 2 * (self.moment_bytes or self.param_bytes)

    @property
    def casts_weights(self) -> bool:
        """Whether each use of a weight casts it (trainer/parallel/ddp.py); FSDP2 gathers weights already cast."""
        return not self.uses_fsdp and self.compute_bytes != self.param_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of one element of a weight's gradient as backward leaves it."""
        return self.compute_bytes if self.uses_fsdp else self.param_bytes

    @property
    def loss_in_backward(self) -> bool:
        """Whether pieces of the loss wait for backward, as where all microbatches go forward first."""
        return self.uses_pipeline and self.schedule in ALL_FORWARD_FIRST

    @property
    def uses_pipeline(self) -> bool:
        return self.mesh.pp > 1

    @property
    def num_tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank."""
        return self.microbatch_size * self.seq_len // self.mesh.cp


def run_shape(job: Job) -> RunShape:
    """The numbers of a job. Whether the closed form describes it: see coverage.py."""
    config, args, dims = job.config, job.args, job.dims
    training, parallelism = config.training, config.parallelism
    reshard = parallelism.fsdp_reshard_after_forward
    uses_copies = computes_in_copies(training, parallelism, config.float8, dims)
    return RunShape(
        family=job.family,
        args=args,
        mesh=dims,
        uses_fsdp=uses_copies or is_fsdp(training, parallelism, config.float8, dims),
        uses_copies=uses_copies,
        stages=job.split.modules,
        schedule=job.schedule,
        microbatch_size=job.microbatch_size,
        num_microbatches=job.num_microbatches,
        num_accumulated=job.num_accumulated,
        seq_len=training.seq_len,
        param_bytes=itemsize(training.dtype),
        compute_bytes=itemsize(training.mixed_precision_param),
        moment_bytes=itemsize(config.optimizer.state_dtype or training.dtype),
        keeps_scores=training.mixed_precision_param == "float32" and args.num_heads != args.num_kv_heads,
        is_offloaded=training.enable_cpu_offload,
        recompute=_recompute(config.activation_checkpoint),
        optimizer=config.optimizer.implementation,
        reshard_after_forward={"default": not keeps_gathered(training, dims), "always": True, "never": False}[reshard],
        reshard_output=reshard == "always",
        loss_parallel=is_loss_parallel(parallelism, dims),
        loss_chunks=job.loss_chunks if training.loss == CHUNKED else 0,
        validation_samples=_validation_samples(job),
        validation_seq_len=config.validation.seq_len,
        compiles_model=compiles(config.compile, "model"),
        compiles_loss=compiles(config.compile, "loss"),
        float8=_float8(config, is_tied=args.tied),
        keeps_buffers=dims.pp == 1 or not allocates_on_receipt(),
        sums_at_once=sums_at_once(),
    )


def _float8(config: Config, *, is_tied: bool) -> Float8Products | None:
    if not is_float8(config.model):
        return None
    is_named = any(part in "output" for part in float8_filters(config.float8, config.training))
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


def _validation_samples(job: Job) -> int:
    """Samples of one forward of validation; 0 if it is off."""
    if not job.config.validation.enable:
        return 0
    return job.microbatch_size if job.dims.pp > 1 else job.config.validation.local_batch_size
