"""The closed-form engine: allocated bytes of one pipeline rank at every instant of a step that may be the peak.

The peak is the largest instant, not a sum of maxima. rank.py has what a rank holds, passes.py how FSDP2, autograd and
the pipeline change it, activations.py, compiled.py, float8.py and loss.py how large tensors are.

Compared with the trace in every estimate, and with torch on a CPU in tests; reserved memory has no closed form.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from titan_tools.memory.formula import float8
from titan_tools.memory.formula.activations import Activations, eager_activations
from titan_tools.memory.formula.compiled import compiled_activations
from titan_tools.memory.formula.loss import loss_bytes, validation_loss_bytes
from titan_tools.memory.formula.passes import (
    backward,
    backward_of_inputs,
    backward_of_weights,
    forward,
    gather_stage,
    gathered_for_output,
    output_sent,
    receive_gradient,
    receive_input,
    reduce_stage,
    reshard_stage,
)
from titan_tools.memory.formula.rank import Instant, Rank, groups_of_stage
from titan_tools.memory.formula.run_shape import FP32, RunShape
from titan_tools.memory.schedules import Action, Kind, actions_of_rank
from trainer.ranks.gpus import HOPPER, Gpu

_BATCH_ELEMENTS = 1 << 26  # trainer's optimizer with other moments makes fp32 copies of this many elements at once


def peak_instant(run: RunShape, *, pp_rank: int, gpu: Gpu) -> Instant:
    """The largest instant of a step on a pipeline rank."""
    return max(instants(run, pp_rank=pp_rank, gpu=gpu), key=lambda instant: instant.total_bytes)


def instants(run: RunShape, *, pp_rank: int, gpu: Gpu) -> Iterator[Instant]:
    """Every instant of a step that may be the peak, in time order."""
    order = [Action("F", 0, 0), Action("B", 0, 0)]
    if run.uses_pipeline:
        shape = {"pp": run.mesh.pp, "num_stages": len(run.stages), "num_microbatches": run.num_microbatches}
        order = actions_of_rank(run.schedule, pp_rank=pp_rank, **shape)
    groups = {stage: groups_of_stage(run, stage) for stage in sorted({action.stage for action in order})}
    rank = Rank(run, groups, activations(run, gpu), loss_bytes(run), gpu)
    for _ in range(run.num_accumulated):
        rank.of_inputs.clear()
        rank.inputs.clear()
        for action in order:
            yield from _INSTANTS[action.kind](rank, action)
    if not run.keeps_buffers:
        rank.of_inputs.clear()
        rank.inputs.clear()
    yield rank.instant("optimizer step", optimizer=_optimizer_bytes(rank))
    if run.validation_samples:
        yield _validation(rank)


_INSTANTS: dict[Kind, Callable[[Rank, Action], Iterator[Instant]]] = {
    "F": forward,
    "B": backward,
    "I": backward_of_inputs,
    "W": backward_of_weights,
    "gather": gather_stage,
    "reshard": reshard_stage,
    "reduce": reduce_stage,
    "RECV_F": receive_input,
    "RECV_B": receive_gradient,
    "WAIT_SEND_F": output_sent,
}


def activations(run: RunShape, gpu: Gpu) -> Activations:
    """What a microbatch takes in the run's blocks: eager or compiled, in bf16 or in float8."""
    if run.mesh.cp > 1 and gpu.sm == HOPPER and run.compute_bytes < FP32 and not run.cpu_attention:
        run = replace(run, splits_keys=True)
    if run.float8 is None:
        return compiled_activations(run, gpu) if run.compiles_model else eager_activations(run, gpu)
    return float8.compiled_activations(run, gpu) if run.compiles_model else float8.eager_activations(run)


def _optimizer_bytes(rank: Rank) -> int:
    """What an optimizer's step allocates at once: by torch's kernel, and for copies of what has another dtype.

    Copies only where moments have another dtype than parameters: of what is not fp32 already.
    """
    run, sizes_by_group = rank.run, [group.local_sizes for group in rank.all_groups()]
    sizes = [size for group in sizes_by_group for size in group]
    if not sizes or run.is_offloaded:
        return 0
    if run.state_bytes == 2 * run.param_bytes:
        return _kernel_elements(run, sizes) * run.param_bytes
    num_copies = 2 * (run.param_bytes != FP32) + 2 * (run.moment_bytes != FP32)  # parameter and gradient; moments
    batches = (batch for group in sizes_by_group for batch in _batches(group))
    return FP32 * max(num_copies * sum(batch) + _kernel_elements(run, batch) for batch in batches)


def _kernel_elements(run: RunShape, sizes: Sequence[int]) -> int:
    """Of torch's Adam: the root of the second moment, foreach of all at once; one by one also the quotient."""
    return {"fused": 0, "foreach": sum(sizes), "for-loop": 2 * max(sizes)}[run.optimizer]


def _batches(sizes: Iterable[int]) -> Iterator[list[int]]:
    """A group's parameters in batches of at most _BATCH_ELEMENTS, or of one parameter, as the trainer makes them."""
    batch: list[int] = []
    for size in sizes:
        if batch and sum(batch) + size > _BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(size)
    if batch:
        yield batch


def _validation(rank: Rank) -> Instant:
    """A forward without gradients, after a step: gathered parameters and the loss of one batch."""
    run = rank.run
    rank.shards.clear()
    last = max(rank.groups)
    kept = [group for group in rank.all_groups() if group.is_kept] if run.uses_fsdp else []
    gathered = sum(rank.gathered_bytes(group) for group in (kept[-1:] if run.uses_copies else kept))
    hidden = run.validation_samples * run.validation_seq_len // run.mesh.cp * run.args.dim * run.compute_bytes
    return rank.instant(
        "validation",
        activations=hidden,
        logits_and_loss=validation_loss_bytes(run) if rank.is_last(last) else 0,
        all_gather=gathered + sum(gathered_for_output(rank, rank.groups[last], is_now=True)),
    )
