"""What ends a run before its last step, or nearly does: an update that would spoil the weights, a request to stop."""

from typing import Literal

from converters.errors import NumericalFault, Preempted, TitanError
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.run_state import Progress
from trainer.observability.log import note
from trainer.step import StepResult


def leave_out_update(
    progress: Progress, result: StepResult, checkpoints: Checkpoints, *, on_nonfinite: Literal["stop", "skip"]
) -> None:
    """Count the next step as one without an update, and say so; or, under `stop`, raise NumericalFault."""
    what = (
        f"step {progress.step + 1}: loss is {result.loss}, gradient norm is {result.grad_norm}; the update was not made"
    )
    if on_nonfinite == "stop":
        raise _numerical_fault(what, checkpoints)
    progress.skipped_steps += 1
    note(f"WARNING: {what}")


def _numerical_fault(what: str, checkpoints: Checkpoints) -> NumericalFault:
    """The error, with the step to go back to, after whatever is being saved."""
    try:
        checkpoints.finish()  # the save under way counts, if it comes to anything
    except TitanError as error:
        note(f"WARNING: {error.message}")
    good = checkpoints.last_good_step
    return NumericalFault(
        what,
        hint=f"the last good checkpoint is step {good}" if good is not None else "there is no checkpoint to go back to",
        tries=[
            "--optimizer.lr LOWER",
            "--lr_scheduler.warmup_steps MORE",
            "--training.on_nonfinite skip, to leave such updates out",
        ],
    )


def preempted(step: int, checkpoints: Checkpoints) -> Preempted:
    """The end on request, after whatever is being saved."""
    checkpoints.finish()
    if checkpoints.last_good_step != step:
        return Preempted(
            f"stopped on request after step {step}; nothing was saved: checkpoint.enable or load_only forbids saving"
        )
    return Preempted(f"stopped on request after step {step}, which is saved", tries=["the same command, to go on"])
