"""What the memory engines need to know of a run, in plain numbers: model, mesh, stages, batch, dtypes, build."""

from dataclasses import dataclass
from typing import Literal

from converters.dtypes import itemsize
from converters.families.base import Family, ModelArgs, Role
from converters.families.registry import get_family
from converters.layout import MeshShape
from titan_tools.memory.layout import resolved_layout
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.loss.registry import ALL_FORWARD_FIRST, CHUNKED, is_loss_parallel
from trainer.parallel.compile import compiles
from trainer.parallel.float8 import is_float8
from trainer.parallel.fsdp import is_fsdp
from trainer.stages import split_model

FP32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which blocks recompute what in backward. `every` counts blocks: with "full", every n-th one is checkpointed."""

    mode: Literal["none", "full", "op"]
    every: int = 1
    stops_early: bool = True  # recomputation ends with what backward reads; else it also uses up the rest that was kept


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTraits:
    """How the train step is built, where that moves memory. Defaults are titan's; published/measure.py sets others."""

    # fused keeps one fp32 number per token; composite an fp32 copy of input and result; python of the input and, in the
    # compute dtype, of the result before its weight
    norm: Literal["fused", "composite", "python"] = "fused"
    embeddings_with_root: bool = False  # tok_embeddings, norm and output in one FSDP group that is never resharded
    last_block_kept: bool = False  # the last block stays gathered between its forward and its backward
    states_from_start: bool = True  # optimizer states are made with the optimizer, not by its first step
    loss_in_forward: bool = True  # the loss ends the model's forward, within which FSDP keeps what it gathered last
    mask_tensors: bool = False  # context parallel's attention takes masks, as on a CPU; a GPU's is told what they are
    attention_buffers: bool = True  # attention's backward takes some inside of its kernel, a CPU's takes none
    stored_gathers: bool = True  # and the results of all-gathers under TP


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Products:
    """The blocks' products are in float8, with a scale per tensor."""

    converts_output: bool  # the output's too
    gathers: bool  # FSDP gathers these weights as float8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """One run. `mesh` has the degrees, `stages` the module names of each pipeline stage, dealt to ranks in turn."""

    family: Family
    args: ModelArgs
    mesh: MeshShape
    uses_fsdp: bool  # FSDP2 wraps the model (also as HSDP, and on one rank for mixed precision)
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
    reshard_output: bool  # norm and output too, which backward needs at once
    loss_parallel: bool
    loss_chunks: int  # pieces that output and loss are computed in; 0: plain, on whole logits
    validation_samples: int = 0  # of one forward without gradients; 0: no validation
    validation_seq_len: int = 0
    moment_bytes: int | None = None  # of one element of an optimizer's moment; None: as param_bytes
    keeps_scores: bool = False  # attention is plain products, as CUDA's is in fp32 where queries are grouped
    is_offloaded: bool = False  # parameters, gradient shards and moments lie in host memory
    compiles_model: bool = False  # each block, with Inductor
    compiles_loss: bool = False
    float8: Float8Products | None = None
    traits: BuildTraits = BuildTraits()

    @property
    def has_head_norms(self) -> bool:
        """Whether every head of q and k is normalized before attention."""
        return self.family.has_role(Role.HEAD_NORM, self.args)

    @property
    def state_bytes(self) -> int:
        """Of both moments of one element of a parameter."""
        return 2 * (self.moment_bytes or self.param_bytes)

    @property
    def casts_weights(self) -> bool:
        """Whether each use of a weight casts it (trainer/parallel/ddp.py): FSDP2 gathers weights cast already."""
        return not self.uses_fsdp and self.compute_bytes != self.param_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of one element of a weight's gradient as backward leaves it: in the dtype of autograd's leaf."""
        return self.compute_bytes if self.uses_fsdp else self.param_bytes

    @property
    def loss_in_backward(self) -> bool:
        """Pieces wait for backward where many microbatches go forward first: trainer/loss/install.py."""
        return self.uses_pipeline and self.schedule in ALL_FORWARD_FIRST

    @property
    def uses_pipeline(self) -> bool:
        return self.mesh.pp > 1

    @property
    def num_tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank."""
        return self.microbatch_size * self.seq_len // self.mesh.cp


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
