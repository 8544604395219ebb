"""The estimate of a run: every pipeline rank's peak in step 1 and later, the worst of them, verdicts per GPU type."""

from dataclasses import dataclass

from titan_tools.memory.constants import CONTEXT_GIB, GIB, GPUS, NCCL_GIB, RESERVED_OVER_ALLOCATED, TORCH_VERSIONS, Gpu
from titan_tools.memory.formula.closed_form import Instant, peak_instant
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.verdict import Verdict, judge

COVERS = (
    "Llama 2, Llama 3 and Qwen 3 in eager mode; FSDP2 and HSDP, TP with sequence and loss parallel, PP (GPipe, 1F1B,"
    " Interleaved1F1B, LoopedBFS), CP, and products of them; gradient accumulation; chunked and plain loss;"
    " checkpointing none, full, op and every n-th layer; Adam and AdamW",
    "not yet: compile, float8, CPU offload, DDP, zero-bubble schedules, async tensor parallel, moments in another"
    " dtype, losses and families of one's own, mixture of experts, reserved memory",
)


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """The peak instants of a pipeline rank; all ranks that share its pp coordinate hold as much or less."""

    pp_rank: int
    step1: Instant
    steady: Instant

    @property
    def worst(self) -> Instant:
        return max(self.step1, self.steady, key=lambda instant: instant.total_bytes)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the closed form says of a run, on the GPU type whose workspaces were counted."""

    run: RunShape
    gpu: Gpu
    ranks: tuple[RankEstimate, ...]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    covers: tuple[str, ...]

    @property
    def worst_rank(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.worst.total_bytes)


def estimate(run: RunShape, *, gpu: Gpu | None = None) -> Estimate:
    """Peak allocated memory per pipeline rank. Without a GPU type all are judged, and workspaces are those of sm90."""
    counted = gpu or GPUS["h100-80"]
    ranks = tuple(
        RankEstimate(
            pp_rank,
            step1=peak_instant(run, pp_rank=pp_rank, gpu=counted, steady=False),
            steady=peak_instant(run, pp_rank=pp_rank, gpu=counted, steady=True),
        )
        for pp_rank in range(run.mesh.pp)
    )
    worst_gib = max(rank.worst.total_bytes for rank in ranks) / GIB
    mesh = run.mesh
    num_communicators = sum(degree > 1 for degree in (mesh.pp, mesh.dp_replicate, mesh.fsdp, mesh.tp, mesh.cp))
    verdicts = tuple(
        judge(candidate, allocated_gib=worst_gib, num_communicators=num_communicators, is_floor=mesh.cp > 1)
        for candidate in ([gpu] if gpu else GPUS.values())
    )
    return Estimate(run, counted, ranks, verdicts, _assumptions(run, counted), COVERS)


def _assumptions(run: RunShape, gpu: Gpu) -> tuple[str, ...]:
    low, high = RESERVED_OVER_ALLOCATED
    said = [
        f"closed form, written for {TORCH_VERSIONS}; eager; fused RMSNorm and flash attention, as on CUDA",
        "allocated memory only: reserved has no closed form. Verdicts take it as"
        f" {low:.2f} to {high:.2f} × allocated, plus {CONTEXT_GIB} GiB of CUDA context and"
        f" {NCCL_GIB[0]:g} to {NCCL_GIB[1]:g} GiB per NCCL communicator",
        f"cuBLAS workspaces: {gpu.cublas_mib:g} MiB each for forward and backward ({gpu.name})",
        "optimizer states are made with the optimizer, so step 1 holds them too",
        "no leak: nothing but the train step keeps tensors alive",
        "rounding of blocks to 512 bytes is not counted (under 0.1 % from 1 GiB on)",
    ]
    if run.uses_fsdp:
        said.append("FSDP2 keeps norm and output gathered from forward to backward, and prefetches one block")
    if run.loss_chunks:
        said.append(
            f"output and loss go in {run.loss_chunks} pieces"
            + (", in backward" if run.loss_in_backward else ", forward and back before the next one")
            + "; the output's gradient is added up in fp32"
        )
    if run.uses_pipeline:
        said.append(
            "torch's pipeline stages hold whole fp32 gradients until the last microbatch, a receive buffer per"
            " microbatch and direction, and drop the last stage's outputs"
        )
    if run.mesh.cp > 1:
        said.append(
            "context parallel: a fused kernel is assumed for the masked attention over gathered keys. Where torch has"
            " none (grouped queries without cuDNN) it keeps all scores, so this is a floor and `fits` is not said"
        )
    return tuple(said)
