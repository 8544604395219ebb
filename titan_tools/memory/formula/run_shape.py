"""What the memory engines need to know of a run, in plain numbers: model, mesh, stages, batch, dtypes, build."""

from dataclasses import dataclass
from typing import Literal

from converters.families.base import Family, ModelArgs, Role
from converters.layout import MeshShape
from trainer.loss.registry import ALL_FORWARD_FIRST

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
