"""The training loop: build, load, train, save. Read this first."""

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from converters.common.errors import Interrupted, NumericalFault, Preempted, TitanError
from converters.store.location import Location
from trainer.build import build
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.export import Exports
from trainer.checkpoints.problems import checkpoint_folder, initial_path, is_saving
from trainer.checkpoints.run_lock import only_run
from trainer.checkpoints.run_state import Progress, RunState
from trainer.checkpoints.shared_folder import require_shared
from trainer.checkpoints.step_folders import step_folder
from trainer.config.load import origins
from trainer.config.sections import Checkpoint, Config
from trainer.job.chosen_model import chosen_model
from trainer.job.dump_folder import make_dump_folder, save_config
from trainer.job.inputs import check_run, raise_all
from trainer.job.job import resolve_job
from trainer.job.memory_bound import require_on_ranks
from trainer.job.record import Job
from trainer.job.resume import as_text, refuse_other_job, resumed_job, say_changes, settings_of
from trainer.job.run_header import header_lines, notes_of
from trainer.job.same_config import require_same_config
from trainer.models.objectives import get_objective
from trainer.objective import check_data
from trainer.observability.flight_recorder import FlightRecorder, collective_failures
from trainer.observability.log import note, phase
from trainer.observability.profiling import PhaseNames, profiled
from trainer.observability.report import Report
from trainer.optim.lr_schedule import LRSchedule, lr_curve
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.attention_backend import attention_backends, widen_attention_on_cpu
from trainer.parallel.cpu_products import fp32_products, multiplies
from trainer.ranks.agree import on_first
from trainer.ranks.mesh import make_meshes
from trainer.ranks.process_group import Ranks, Timeouts, join_ranks, leave_ranks
from trainer.ranks.signals import StopRequest, lost_steps
from trainer.runtime import GarbageCollection, device_name, set_determinism
from trainer.step import StepResult, TrainStep
from trainer.validate import Validator


def main(
    config: Config,
    *,
    ignore_memory: bool = False,
    tell_launcher: Callable[[str], None] | None = None,
    is_described: bool = False,
) -> None:
    """Train on this rank, together with the other ranks that the launcher has started.

    `ignore_memory`: start even if weights, gradients and moments exceed the memory that is available.
    `tell_launcher`: see StopRequest. `is_described`: the launcher has checked the run, and printed its first lines.
    Raises NumericalFault before an update with NaN, and Preempted after saving on request.
    """
    stop = StopRequest(tell_launcher=tell_launcher)
    stop.listen()
    FlightRecorder.of(config.comm, Path(config.job.dump_folder)).switch_on()
    with phase("waiting for all ranks"):
        ranks = join_ranks(
            init_timeout_secs=config.comm.init_timeout_seconds, has_cpu_tensors=config.training.enable_cpu_offload
        )
    require_same_config(config, ranks.agreement)
    job = resolve_job(config, dist.get_world_size(), option="--nproc")
    if not is_described:
        for line in on_first(ranks.agreement, lambda: described(job, ranks.device)):
            note(line)
    if not ignore_memory:
        require_on_ranks(job, ranks)
    train(job, ranks, stop)
    leave_ranks()


def described(job: Job, device: torch.device) -> list[str]:
    """The first lines of the run. Raises what can be refused before anything is built."""
    checked = check_run(job, device)
    raise_all(checked.not_here)
    return header_lines(checked, device=device_name(device))


def train(job: Job, ranks: Ranks, stop: StopRequest) -> None:
    """The whole run on joined ranks, under the lock of its checkpoint folder."""
    config = job.config
    set_determinism(config.debug)
    if config.job.print_config:
        for key, setting in origins(config).items():
            note(f"  {key} = {setting.value!r}  ({setting.origin})")
    settings, dump_folder = config.checkpoint, Path(config.job.dump_folder)
    on_first(ranks.agreement, lambda: make_dump_folder(dump_folder))
    on_first(ranks.agreement, lambda: save_config(config))
    progress = Progress()
    recorder = FlightRecorder.of(config.comm, dump_folder)
    with collective_failures(recorder, progress), ExitStack() as stack:  # rank 0 holds the lock for all
        if is_saving(settings):
            folder = checkpoint_folder(config)
            on_first(ranks.agreement, lambda: stack.enter_context(only_run(folder)))
            require_shared(folder, ranks.agreement)
        stack.enter_context(attention_backends(ranks.device))
        train_locked(job, ranks, stop, progress, stack)


def train_locked(job: Job, ranks: Ranks, stop: StopRequest, progress: Progress, stack: ExitStack) -> None:
    """Build, load, train. `stack` closes what was opened, also after an error."""
    # Resume: what the run keeps of its checkpoint
    settings, dump_folder = job.config.checkpoint, Path(job.config.job.dump_folder)
    config_job, info, initial = job, chosen_model(job), initial_path(settings, job.config.model)
    checkpoints = stack.enter_context(Checkpoints(checkpoint_folder(job.config), settings, info, group=ranks.agreement))
    objective = get_objective(job.family.name)
    per_sample = objective.units_per_sample(job)
    if recorded := checkpoints.recorded(checkpoints.candidates(initial), units_per_sample=per_sample):
        job = resumed_job(config_job, recorded)
    config, training = job.config, job.config.training

    # Build
    for text in notes_of(job, info.assets):
        note(text)
    meshes = make_meshes(job.dims, ranks.device.type)
    timeouts = Timeouts(meshes, config.comm)
    with phase("building the model"):
        model = build(job, meshes, ranks.device)
    widen_attention_on_cpu(model.parts, ranks.device)
    if not multiplies(getattr(torch, training.mixed_precision_param), ranks.device):
        note(f"this CPU has no {training.mixed_precision_param} products: they are computed in fp32 and rounded")
        stack.enter_context(fp32_products())
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    model.follow(optimizer)
    schedule = LRSchedule(optimizer, lr_curve(config.lr_scheduler, training.steps))
    with phase("opening the data"):
        data = objective.open_data(job, meshes, ranks.agreement)
        check_data(data, objective)
    validator = Validator(model, data.held_out) if config.validation.enable else None
    train_step = TrainStep(
        model,
        meshes,
        max_norm=training.max_norm,
        local_batch_size=training.local_batch_size,
        num_batches=job.num_accumulated,
        observer=PhaseNames() if config.profiling.enable_profiling else None,
        stop_requested=lambda: stop.requested or checkpoints.must_stop,
    )
    state = RunState(model, optimizer, schedule, data.loader, progress)

    # Load
    exports = Exports(dump_folder, settings, info, group=ranks.agreement)
    with phase("reading the checkpoint" if recorded or initial else "drawing the initial weights"):
        loaded = load(config.checkpoint, initial, job.seed, state, checkpoints)
    if (
        recorded
        and loaded
        and loaded != recorded.path
        and (recorded := checkpoints.recorded([loaded], units_per_sample=per_sample))
    ):
        refuse_other_job(resumed_job(config_job, recorded), job, loaded)  # the step that was looked at is damaged
    run_settings = on_first(ranks.agreement, lambda: settings_of(job, info))
    if recorded:
        say_changes(recorded, run_settings)
    progress.settings = as_text(run_settings)
    if is_saving(settings):
        checkpoints.get_ready(model)  # raises now what the first save would raise
        exports.get_ready(model.named_buffers(), beside_bytes=checkpoints.bytes_of_step(model))
    num_done = progress.step
    if num_done >= training.steps:
        note(f"step {num_done} of {training.steps} is done already: nothing to do")

    # Train
    batch_rank = meshes["batch"].get_local_rank()
    report = stack.enter_context(
        Report(job, progress, device=ranks.device, rank=dist.get_rank(), batch_rank=batch_rank)
    )
    if config.metrics.enable_wandb:  # a resumed run continues the run at Weights & Biases
        progress.wandb_run_id = on_first(ranks.agreement, lambda: report.wandb_run_id) or progress.wandb_run_id
    batches = iter(data.loader)

    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # on each machine: Ctrl-C reaches the ranks of one

    def say_lost(step: int) -> None:
        if is_first_here and stop.takes_interrupts:
            stop.report_step(lost_steps(step, kept=max(checkpoints.last_good_step or 0, num_done)))

    first_step = phase("compiling, in the first step" if config.compile.enable else "running the first step")
    with (
        GarbageCollection(training.gc_freq, debug=training.gc_debug) as garbage,
        profiled(config.profiling, dump_folder, rank=dist.get_rank(), num_done=num_done) as profiler,
    ):
        while progress.step < training.steps:
            with report.fetching():
                samples = next(batches)
            with first_step if progress.step == num_done else nullcontext():
                result = train_step.run(samples, optimizer)
            if result.is_finite:
                progress.units_seen += result.num_units
            else:
                count_skipped(progress, result, checkpoints, on_nonfinite=training.on_nonfinite)
            optimizer.zero_grad()
            lr = schedule.lr
            schedule.step()
            progress.step += 1
            report.step(progress, result, lr=lr)
            say_lost(progress.step)

            is_last = progress.step == training.steps
            is_final = is_last or result.stop_requested
            with report.paused():
                if validator and (is_last or progress.step % config.validation.freq == 0):
                    with timeouts.of_validation():
                        losses = validator.run()
                    report.validation(progress.step, losses)
                if is_saved(progress.step, settings, is_final=is_final):
                    model_only = is_last and settings.last_save_model_only
                    checkpoints.save(progress.step, state, model_only=model_only, is_final=is_final)
                profiler.step()
                garbage.collect(progress.step)
            if result.stop_requested and not is_last:
                raise stopped(progress.step, num_done, checkpoints, by_user=stop.by_user)
            if progress.step == num_done + 1:
                stop.take_interrupts(saves=is_saving(settings))
                timeouts.end_first_step()
            say_lost(progress.step)
    checkpoints.finish()
    exports.make(step_folder(checkpoints.folder, progress.step), is_new=progress.step > num_done)


def load(
    settings: Checkpoint, initial: Location | None, seed: int, state: RunState, checkpoints: Checkpoints
) -> Location | None:
    """Load the run's newest complete step; else the initial checkpoint; else draw initial weights from the seed.

    Returns the checkpoint that was loaded; None if there is none.
    """
    resumed = checkpoints.resume(state) if settings.enable else None
    if resumed:
        note(f"resumed from {resumed}")
    elif initial:
        checkpoints.load_initial(initial, state)
        note(f"started from {initial}")
    else:
        state.model.initialize(seed)
        note(f"started from initial weights, seed {seed}: there is no checkpoint to load")
    return resumed or initial


def is_saved(step: int, settings: Checkpoint, *, is_final: bool) -> bool:
    """Whether to save after this step. `is_final`: the run ends with it."""
    is_due = is_final or step % settings.interval == 0 or (step == 1 and settings.enable_first_step_checkpoint)
    return is_saving(settings) and is_due


def count_skipped(
    progress: Progress, result: StepResult, checkpoints: Checkpoints, *, on_nonfinite: Literal["stop", "skip"]
) -> None:
    """Count the step as skipped, with a warning; or with `stop` raise NumericalFault."""
    what = f"step {progress.step + 1}: loss is {result.loss}, gradient norm is {result.grad_norm}"
    if on_nonfinite == "stop":
        raise _numerical_fault(f"{what}; training stopped before the update", checkpoints)
    progress.skipped_steps += 1
    note(f"WARNING: {what}; the update was skipped")


def _numerical_fault(what: str, checkpoints: Checkpoints) -> NumericalFault:
    """The error, with the last good step, after the current save."""
    try:
        checkpoints.finish()  # the current save counts if it succeeds
    except TitanError as error:
        note(f"WARNING: {error.message}")
    good = checkpoints.last_good_step
    return NumericalFault(
        what,
        hint=f"the last good checkpoint is step {good}" if good is not None else "there is no earlier checkpoint",
        tries=[
            "--optimizer.lr LOWER",
            "--lr_scheduler.warmup_steps MORE",
            "--training.on_nonfinite skip, to skip such updates",
        ],
    )


def stopped(step: int, num_done: int, checkpoints: Checkpoints, *, by_user: bool) -> Preempted:
    """The error that ends the run on request, after the current save. `num_done`: steps that it began with."""
    checkpoints.finish()
    kind, how = (Interrupted, "interrupted") if by_user else (Preempted, "stopped on request")
    if checkpoints.last_good_step == step:
        return kind(f"{how} after step {step}, which is saved", tries=["the same command, to resume"])
    return kind(
        f"{how} after step {step}; nothing was saved, and {lost_steps(step, kept=num_done)}",
        hint="checkpoint.enable = false or checkpoint.load_only = true forbids saving",
    )
