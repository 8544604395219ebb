"""Instants after backward: the optimizer's step, and a validation between two steps."""

from titan_tools.memory.formula.forward import gathered_for_output
from titan_tools.memory.formula.loss import validation_loss_bytes
from titan_tools.memory.formula.optimizer import step_bytes
from titan_tools.memory.formula.rank import Instant, Rank


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
