"""The closed-form engine: allocated bytes of one pipeline rank at every instant of a step where the peak can be.

The peak is the largest instant, not a sum of maxima. What a rank holds is written in rank.py, what FSDP2, autograd and
the pipeline do to it in the files of the actions imported here, how large a tensor is in activations.py and
holdings.py. Checked against published peaks of torchtitan and against torch on CPU; there is no closed form for
reserved memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from titan_tools.memory.constants import Gpu
from titan_tools.memory.formula import float8
from titan_tools.memory.formula.activations import Activations, eager_activations
from titan_tools.memory.formula.backward import backward, backward_of_inputs, backward_of_weights, reduce_stage
from titan_tools.memory.formula.compiled import compiled_activations
from titan_tools.memory.formula.forward import forward, gather_stage, gathered_for_output, reshard_stage
from titan_tools.memory.formula.loss import loss_bytes, validation_loss_bytes
from titan_tools.memory.formula.rank import Instant, Rank, groups_of_stage
from titan_tools.memory.formula.run_shape import FP32, RunShape
from titan_tools.memory.schedules import Action, Kind, actions_of_rank, with_sharding


def peak_instant(run: RunShape, *, pp_rank: int, gpu: Gpu, steady: bool) -> Instant:
    """The largest instant of step 1, or of a later step, on a pipeline rank."""
    return max(instants(run, pp_rank=pp_rank, gpu=gpu, steady=steady), key=lambda instant: instant.total_bytes)


def instants(run: RunShape, *, pp_rank: int, gpu: Gpu, steady: bool) -> Iterator[Instant]:
    """Every instant looked at, in time order."""
    schedule = run.schedule if run.uses_pipeline else "GPipe"
    computed = actions_of_rank(
        schedule, pp_rank=pp_rank, pp=run.mesh.pp, num_stages=len(run.stages), num_microbatches=run.num_microbatches
    )
    order = with_sharding(computed, schedule) if run.uses_pipeline else computed
    groups = {stage: groups_of_stage(run, stage) for stage in sorted({action.stage for action in computed})}
    has_states = steady or run.traits.states_from_start
    rank = Rank(run, groups, activations(run, gpu), loss_bytes(run), gpu, has_states)
    for _ in range(run.num_accumulated):
        rank.of_inputs.clear()
        for action in order:
            yield from _HAPPENS[action.kind](rank, action)
    yield optimizer_step(rank)
    if run.validation_samples:
        yield validation(rank)


_HAPPENS: dict[Kind, Callable[[Rank, Action], Iterator[Instant]]] = {
    "F": forward,
    "B": backward,
    "I": backward_of_inputs,
    "W": backward_of_weights,
    "gather": gather_stage,
    "reshard": reshard_stage,
    "reduce": reduce_stage,
}


def activations(run: RunShape, gpu: Gpu) -> Activations:
    """What microbatches take, as the run's blocks compute: eager or compiled, in bf16 or in float8."""
    if run.float8 is None:
        return compiled_activations(run, gpu) if run.compiles_model else eager_activations(run, gpu)
    return float8.compiled_activations(run, gpu) if run.compiles_model else float8.eager_activations(run)


def optimizer_step(rank: Rank) -> Instant:
    """All gradients and, in step 1 too, all states, and what the step itself needs."""
    sizes_by_group = [group.local_sizes for group in rank.all_groups()]
    return rank.instant("optimizer step", optimizer=_states(rank) + step_bytes(rank.run, sizes_by_group))


def validation(rank: Rank) -> Instant:
    """A forward without gradients, after a step: gathered parameters and the loss of one batch."""
    run = rank.run
    rank.shards.clear()
    groups = rank.groups[max(rank.groups)]
    gathered = sum(rank.gathered_bytes(group) for group in rank.all_groups() if group.is_kept) if run.uses_fsdp else 0
    hidden = run.validation_samples * run.validation_seq_len // run.mesh.cp * run.args.dim * run.compute_bytes
    return rank.instant(
        "validation",
        activations=hidden,
        logits_and_loss=validation_loss_bytes(run) if rank.is_last(max(rank.groups)) else 0,
        all_gather=gathered + sum(gathered_for_output(rank, groups, is_now=True)),
        optimizer=_states(rank),
    )


def _states(rank: Rank) -> int:
    """Optimizer states that this step made: none where they were there already."""
    is_made = not rank.has_states and not rank.run.is_offloaded
    return rank.local_elements * rank.run.state_bytes if is_made else 0


COPIED_ELEMENTS = 1 << 26  # trainer/moments.py: what it makes fp32 copies of at once


def step_bytes(run: RunShape, sizes_by_group: Sequence[Sequence[int]]) -> int:
    """The most at once, for parameters of so many elements here: torch's kernel, and the copies that it works on.

    Copies only where moments have another dtype than parameters (trainer/moments.py): of what is not fp32 already.
    """
    sizes = [size for group in sizes_by_group for size in group]
    if not sizes or run.is_offloaded:
        return 0
    if run.state_bytes == 2 * run.param_bytes:
        return _kernel_elements(run, sizes) * run.param_bytes
    num_copies = 2 * (run.param_bytes != FP32) + 2 * (run.moment_bytes != FP32)  # of parameter and gradient, of moments
    batches = (batch for group in sizes_by_group for batch in _batches(group))
    return FP32 * max(num_copies * sum(batch) + _kernel_elements(run, batch) for batch in batches)


def _kernel_elements(run: RunShape, sizes: Iterable[int]) -> int:
    """Of torch's Adam: the root of the second moment, foreach of all at once; one by one also what it is divided to."""
    return {"fused": 0, "foreach": sum(sizes), "for-loop": 2 * max(sizes)}[run.optimizer]


def _batches(sizes: Iterable[int]) -> Iterator[list[int]]:
    """As trainer/moments.py makes them of a group: runs that come to no more than COPIED_ELEMENTS, or one alone."""
    batch: list[int] = []
    for size in sizes:
        if batch and sum(batch) + size > COPIED_ELEMENTS:
            yield batch
            batch = []
        batch.append(size)
    if batch:
        yield batch
