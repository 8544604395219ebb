"""Training, in the order it happens: build, load, step after step, the last checkpoint. Read this first."""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from converters.tokenizers.config_tokens import tokenizer_notes
from trainer.agree import on_first
from trainer.build import build
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.export import Exports
from trainer.checkpoints.problems import initial_path, is_saving
from trainer.checkpoints.run_lock import only_run
from trainer.checkpoints.run_state import Progress, RunState
from trainer.checkpoints.step_folders import step_folder
from trainer.chosen_model import NO_TOKENIZER, chosen_model
from trainer.config.load import origins
from trainer.config.sections import Checkpoint, Config, Validation
from trainer.determinism import set_determinism
from trainer.dump_folder import make_dump_folder, save_config
from trainer.endings import leave_out_update, preempted
from trainer.garbage import GarbageCollection
from trainer.lr_schedule import LRSchedule, lr_curve
from trainer.mesh import make_meshes
from trainer.optim import build_optimizer
from trainer.parallel.attention_backend import attention_backends, widen_attention_on_cpu
from trainer.parallel_dims import resolve, samples_per_step
from trainer.ranks import Ranks, join_ranks, leave_ranks, set_train_timeout
from trainer.run_data import held_out, text_preparation, train_loader
from trainer.signals import StopRequest
from trainer.step import TrainStep
from trainer.watching.flight_recorder import FlightRecorder, failures_told
from trainer.watching.metrics import note
from trainer.watching.profiling import profiled
from trainer.watching.report import Report


def main(config: Config) -> None:
    """Train on this rank, together with the others that the launcher has started.

    Raises NumericalFault before an update that a NaN would spoil, and Preempted after saving on request.
    """
    stop = StopRequest()
    stop.listen()
    FlightRecorder.of(config.comm, Path(config.job.dump_folder)).switch_on()
    ranks = join_ranks(
        init_timeout_secs=config.comm.init_timeout_seconds, has_cpu_tensors=config.training.enable_cpu_offload
    )
    train(config, ranks, stop)
    leave_ranks()


def train(config: Config, ranks: Ranks, stop: StopRequest) -> None:
    """The whole run, once the ranks know each other: the only one that saves to its folder."""
    set_determinism(config.debug)
    announce(config)
    settings, dump_folder = config.checkpoint, Path(config.job.dump_folder)
    on_first(ranks.agreement, lambda: make_dump_folder(dump_folder))
    on_first(ranks.agreement, lambda: save_config(config))
    progress = Progress()
    recorder = FlightRecorder.of(config.comm, dump_folder)
    with failures_told(recorder, progress), ExitStack() as held:  # the lock: by rank 0, for all
        if is_saving(settings):
            on_first(ranks.agreement, lambda: held.enter_context(only_run(dump_folder / settings.folder)))
        held.enter_context(attention_backends(ranks.device))
        train_alone(config, ranks, stop, progress, held)


def train_alone(config: Config, ranks: Ranks, stop: StopRequest, progress: Progress, held: ExitStack) -> None:
    """Build, load, train. `held`: what is let go of in the end, however that comes."""
    training, settings, dump_folder = config.training, config.checkpoint, Path(config.job.dump_folder)

    # Build
    info = chosen_model(config.model, config.training)
    if not info.assets:
        note(NO_TOKENIZER)
    for told in tokenizer_notes(info.assets):
        note(told)
    dims = resolve(config.parallelism, dist.get_world_size())
    meshes = make_meshes(dims, ranks.device.type)
    model = build(config, info.args, dims, meshes, ranks.device)
    widen_attention_on_cpu(model.parts, ranks.device)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    model.follow(optimizer)
    schedule = LRSchedule(optimizer, lr_curve(config.lr_scheduler, training.steps))
    preparation = text_preparation(config, ranks.agreement)
    loader = train_loader(config, meshes, preparation, vocab_size=info.args.vocab_size, group=ranks.agreement)
    validation = held_out(config, model, meshes, preparation)
    train_step = TrainStep(model, meshes, max_norm=training.max_norm, local_batch_size=training.local_batch_size)
    state = RunState(model, optimizer, schedule, loader, progress)

    # Load
    checkpoints = held.enter_context(Checkpoints(dump_folder / settings.folder, settings, info, group=ranks.agreement))
    exports = Exports(dump_folder, settings, info, group=ranks.agreement)
    load(config, state, checkpoints)
    if is_saving(settings):
        checkpoints.get_ready(model)  # what forbids saving is told now, and not at the first save
        exports.get_ready(beside_bytes=checkpoints.bytes_of_step(model))
    num_done = progress.step
    if num_done >= training.steps:
        note(f"step {num_done} of {training.steps} is done already: nothing to do")

    # Train
    num_samples = samples_per_step(training, dims.batch)
    rank = dist.get_rank()
    report = Report(config, info, num_samples=num_samples, device=ranks.device, rank=rank, num_done=num_done)
    batches = iter(loader)
    with (
        GarbageCollection(training.gc_freq, debug=training.gc_debug) as garbage,
        profiled(config.profiling, dump_folder, rank=dist.get_rank(), num_done=num_done) as profiler,
    ):
        while progress.step < training.steps:
            with report.fetching():
                samples = next(batches)
            result = train_step.compute_gradients(samples, stop_requested=stop.requested or checkpoints.must_stop)
            if result.is_finite:
                optimizer.step()
                progress.ntokens_seen += result.num_valid_tokens
            else:
                leave_out_update(progress, result, checkpoints, on_nonfinite=training.on_nonfinite)
            optimizer.zero_grad()
            lr = schedule.lr
            schedule.step()
            progress.step += 1
            report.step(progress, result, lr=lr)

            is_last = progress.step == training.steps
            is_final = is_last or result.stop_requested
            with report.paused():
                if is_validated(progress.step, config.validation, is_last=is_last):
                    report.validation(progress.step, validation.run())
                if is_saved(progress.step, settings, is_final=is_final):
                    model_only = is_last and settings.last_save_model_only
                    checkpoints.save(progress.step, state, model_only=model_only, is_final=is_final)
                profiler.step()
                garbage.collect(progress.step)
            if result.stop_requested and not is_last:
                raise preempted(progress.step, checkpoints)
            if progress.step == num_done + 1:
                set_train_timeout(meshes, config.comm.train_timeout_seconds)
    report.close()
    checkpoints.finish()
    exports.make(step_folder(checkpoints.folder, progress.step), is_new=progress.step > num_done)


def announce(config: Config) -> None:
    """Say what is about to run, on how many ranks, and, if asked, under which settings."""
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    note(f"{config.job.description}: {config.model.name} {config.model.flavor} on {ranks}")
    if config.job.print_config:
        for key, setting in origins(config).items():
            note(f"  {key} = {setting.value!r}  ({setting.origin})")


def load(config: Config, state: RunState, checkpoints: Checkpoints) -> None:
    """The run's own newest good step; else the initial checkpoint; else first weights from the seed. Says which."""
    settings = config.checkpoint
    own = checkpoints.find() if settings.enable else None
    if own:
        checkpoints.load(own, state)
        note(f"resumed from {own}")
    elif path := initial_path(config):
        checkpoints.load_initial(path, state)
        note(f"started from {path}")
    else:
        state.model.initialize(config.debug.seed or 0)
        note(f"started from first weights, seed {config.debug.seed or 0}: there is no checkpoint to load")


def is_saved(step: int, settings: Checkpoint, *, is_final: bool) -> bool:
    """Whether a checkpoint is due after this step. `is_final`: the run ends with it."""
    is_due = is_final or step % settings.interval == 0 or (step == 1 and settings.enable_first_step_checkpoint)
    return is_saving(settings) and is_due


def is_validated(step: int, settings: Validation, *, is_last: bool) -> bool:
    """Whether the held-out loss is due after this step."""
    return settings.enable and (is_last or step % settings.freq == 0)
