"""The closed-form engine: allocated bytes of one pipeline rank at every instant of a step where the peak can be.

The peak is the largest instant, not a sum of maxima. What a rank holds is written in rank.py, what FSDP2, autograd and
the pipeline do to it in the files of the actions imported here, how large a tensor is in activations.py and
holdings.py. Checked against published peaks of torchtitan and against torch on CPU; there is no closed form for
reserved memory.
"""

from collections.abc import Callable, Iterator

from titan_tools.memory.constants import Gpu
from titan_tools.memory.formula import float8
from titan_tools.memory.formula.activations import Activations
from titan_tools.memory.formula.attention import eager_activations
from titan_tools.memory.formula.backward import backward
from titan_tools.memory.formula.compiled import compiled_activations
from titan_tools.memory.formula.forward import forward
from titan_tools.memory.formula.gathering import gather_stage, reshard_stage
from titan_tools.memory.formula.holdings import groups_of_stage
from titan_tools.memory.formula.loss import loss_bytes
from titan_tools.memory.formula.rank import Instant, Rank
from titan_tools.memory.formula.reduction import reduce_stage
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.formula.split_backward import backward_of_inputs, backward_of_weights
from titan_tools.memory.formula.update import optimizer_step, validation
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
