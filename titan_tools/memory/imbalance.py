"""How unevenly tokens may go to experts: the rows that a rank's experts receive, over the mean of all ranks."""

from converters.families.blocks import Experts
from trainer.job.record import Job
from trainer.parallel.experts import has_experts

# What verdicts assume unless told otherwise: torchtitan advises buffers of this factor for HybridEP (torchtitan#2207)
JUDGED_IMBALANCE = 1.5


def worst_imbalance(job: Job) -> float:
    """If all tokens chose as many experts of one rank as they can; 1 if every rank has the rows of its own tokens.

    Without expert parallelism no router has an effect on memory, nor where debug.moe_force_load_balance replaces it.
    """
    ep = job.dims.ep
    if ep == 1 or job.config.debug.moe_force_load_balance:
        return 1.0
    mixtures = [block.feed_forward for block in job.family.blocks(job.args)]
    return max(ep * min(m.top_k, m.num // ep) / m.top_k for m in mixtures if isinstance(m, Experts))


def imbalance_problems(job: Job, imbalance: float | None) -> list[str]:
    """Why an imbalance cannot be assumed for a job."""
    if imbalance is None:
        return []
    if not has_experts(job.family, job.args):
        return [f"--imbalance {imbalance:g}: the model has no experts; leave it out"]
    worst = worst_imbalance(job)
    if worst == 1:
        why = (
            "debug.moe_force_load_balance sends tokens to the experts in turn"
            if job.config.debug.moe_force_load_balance
            else "without expert parallelism every rank computes the rows of its own tokens"
        )
        return [f"--imbalance {imbalance:g}: {why}, so memory does not depend on the router; leave it out"]
    if not 1 <= imbalance <= worst:
        nearest = worst if imbalance > worst else 1
        return [
            f"--imbalance {imbalance:g} is not between 1 (balanced) and {worst:g}, if all tokens chose one rank's"
            f" experts; nearest: {nearest:g}"
        ]
    return []
