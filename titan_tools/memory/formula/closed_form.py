"""The closed-form engine: allocated bytes of one pipeline rank at every instant of a step where the peak can be.

The peak is the largest instant, not a sum of maxima. What FSDP2, autograd and the pipeline keep at a moment is written
in rank.py, how large a tensor is in activations.py and holdings.py. Checked against published peaks of torchtitan and
against torch on CPU; there is no closed form for reserved memory.
"""

from collections.abc import Iterator

from titan_tools.memory.constants import Gpu
from titan_tools.memory.formula.activations import activations_of
from titan_tools.memory.formula.compiled import compiled_activations
from titan_tools.memory.formula.holdings import groups_of_stage
from titan_tools.memory.formula.loss import loss_bytes
from titan_tools.memory.formula.rank import Instant, Rank
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.schedules import actions_of_rank


def peak_instant(run: RunShape, *, pp_rank: int, gpu: Gpu, steady: bool) -> Instant:
    """The largest instant of step 1, or of a later step, on a pipeline rank."""
    return max(instants(run, pp_rank=pp_rank, gpu=gpu, steady=steady), key=lambda instant: instant.total_bytes)


def instants(run: RunShape, *, pp_rank: int, gpu: Gpu, steady: bool) -> Iterator[Instant]:
    """Every instant looked at, in time order."""
    order = actions_of_rank(
        run.schedule if run.uses_pipeline else "GPipe",
        pp_rank=pp_rank,
        pp=run.mesh.pp,
        num_stages=len(run.stages),
        num_microbatches=run.num_microbatches,
    )
    stages = sorted({action.stage for action in order})
    has_states = steady or run.traits.states_from_start
    groups = {stage: groups_of_stage(run, stage) for stage in stages}
    sizes = compiled_activations(run, gpu) if run.compiles_model else activations_of(run)
    rank = Rank(run, groups, sizes, loss_bytes(run), gpu, has_states)
    for _ in range(run.num_accumulated):
        for action in order:
            yield from rank.forward(action) if action.kind == "F" else rank.backward(action)
        if run.uses_pipeline and run.uses_fsdp:
            yield from rank.reduce_after_pipeline()
    yield rank.optimizer_step()
    if run.validation_samples:
        yield rank.validation()
