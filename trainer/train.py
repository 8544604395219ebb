"""Training, in the order it happens: build, load, step after step, the last checkpoint. Read this first."""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from converters.errors import NumericalFault, Preempted, TitanError
from converters.names import TEXT_INDEXES
from trainer.agree import on_each, on_first
from trainer.build import build
from trainer.checkpoint import Checkpoints
from trainer.checkpoint_problems import initial_path, is_saving
from trainer.chosen_model import NO_TOKENIZER, chosen_model, tokenizer_folder
from trainer.config.load import origins
from trainer.config.sections import Checkpoint, Config, Debug, Training
from trainer.data.text_index import Preparation
from trainer.data.training_data import Loader, open_training_data
from trainer.dump_folder import make_dump_folder, save_config
from trainer.export import Exports
from trainer.flight_recorder import FlightRecorder, failures_told
from trainer.garbage import GarbageCollection
from trainer.lr_schedule import Curve, LRSchedule
from trainer.mesh import Meshes, make_meshes
from trainer.metrics import note
from trainer.optim import build_optimizer
from trainer.parallel.attention_backend import attention_backends
from trainer.parallel_dims import resolve
from trainer.profiling import profiled
from trainer.ranks import Ranks, join_ranks, leave_ranks, set_train_timeout
from trainer.report import Report
from trainer.run_lock import only_run
from trainer.run_state import Progress, RunState
from trainer.signals import StopRequest
from trainer.step import StepResult, TrainStep
from trainer.step_folders import step_folder
from trainer.validate import Validation


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
    dims = resolve(config.parallelism, dist.get_world_size())
    meshes = make_meshes(dims, ranks.device.type)
    model = build(config, info.args, dims, meshes, ranks.device)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    model.follow(optimizer)
    schedule = LRSchedule(optimizer, lr_curve(config))
    preparation = text_preparation(config, ranks.agreement)
    loader = train_loader(config, meshes, preparation, vocab_size=info.args.vocab_size, group=ranks.agreement)
    state = RunState(model, optimizer, schedule, loader, progress)
    train_step = TrainStep(model, meshes, max_norm=training.max_norm, local_batch_size=training.local_batch_size)
    validation = None
    if config.validation.enable:
        pin_memory = config.validation_dataloader.pin_memory
        validation = Validation(model, config.validation, meshes, preparation, pin_memory=pin_memory)

    # Load
    checkpoints = held.enter_context(
        Checkpoints(dump_folder / settings.folder, settings, info, group=ranks.agreement)
    )
    exports = Exports(dump_folder, settings, info, group=ranks.agreement)
    load(config, state, checkpoints)
    if is_saving(settings):
        checkpoints.get_ready(model)  # what forbids saving is told now, and not at the first save
        exports.get_ready(beside_bytes=checkpoints.bytes_of_step(model))
    num_done = progress.step
    if progress.step >= training.steps:
        note(f"step {progress.step} of {training.steps} is done already: nothing to do")

    # Train
    num_samples = samples_per_step(training, dims.batch)
    report = Report(config, info, num_samples=num_samples, device=ranks.device, rank=dist.get_rank())
    batches = iter(loader)
    is_first = True
    with (
        GarbageCollection(training.gc_freq, debug=training.gc_debug) as garbage,
        profiled(config.profiling, dump_folder, rank=dist.get_rank(), num_done=progress.step) as profiler,
    ):
        while progress.step < training.steps:
            with report.fetching():
                samples = next(batches)
            result = train_step.compute_gradients(samples, stop_requested=stop.requested or checkpoints.must_stop)
            if result.is_finite:
                optimizer.step()
                progress.ntokens_seen += result.num_valid_tokens
            elif training.on_nonfinite == "skip":
                progress.skipped_steps += 1
                note(f"WARNING: {not_finite(progress.step + 1, result)}")
            else:
                raise numerical_fault(progress.step + 1, result, checkpoints)
            optimizer.zero_grad()
            lr = schedule.lr
            schedule.step()
            progress.step += 1
            report.step(progress, result, lr=lr)

            is_last = progress.step == training.steps
            with report.paused():
                if validation and (progress.step % config.validation.freq == 0 or is_last):
                    report.validation(progress.step, validation.run())
                is_final = is_last or result.stop_requested
                if is_saved(progress.step, settings, is_last=is_final):
                    model_only = is_last and settings.last_save_model_only
                    checkpoints.save(progress.step, state, model_only=model_only, is_final=is_final)
                profiler.step()
                garbage.collect(progress.step)
            if result.stop_requested and not is_last:
                checkpoints.finish()
                raise preempted(progress.step, checkpoints)
            if is_first:
                set_train_timeout(meshes, config.comm.train_timeout_seconds)
                is_first = False
    report.close()
    checkpoints.finish()
    exports.make(step_folder(checkpoints.folder, progress.step), is_new=progress.step > num_done)


def set_determinism(debug: Debug) -> None:
    """Seed torch, for models that draw numbers as they go; weights and data have seeds of their own."""
    torch.manual_seed((debug.seed or 0) + dist.get_rank())
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses determinism without it
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)


def announce(config: Config) -> None:
    """Say what is about to run, on how many ranks, and, if asked, under which settings."""
    ranks = f"{dist.get_world_size()} rank{'s' if dist.get_world_size() > 1 else ''}"
    note(f"{config.job.description}: {config.model.name} {config.model.flavor} on {ranks}")
    if config.job.print_config:
        for key, setting in origins(config).items():
            note(f"  {key} = {setting.value!r}  ({setting.origin})")


def lr_curve(config: Config) -> Curve:
    settings, total_steps = config.lr_scheduler, config.lr_scheduler.total_steps or config.training.steps
    curve = Curve.of(
        total_steps,
        warmup_steps=settings.warmup_steps,
        decay_ratio=settings.decay_ratio,
        decay_type=settings.decay_type,
        min_lr_factor=settings.min_lr_factor,
    )
    if curve.warmup_steps < settings.warmup_steps:
        note(f"lr_scheduler.warmup_steps = {settings.warmup_steps} is cut to the {total_steps} steps of the curve")
    return curve


def samples_per_step(training: Training, dp_degree: int) -> int:
    """Samples of one step over all ranks; beyond one pass of each rank they are accumulated."""
    size = training.global_batch_size
    return training.local_batch_size * dp_degree if size == -1 else size


def text_preparation(config: Config, group: dist.ProcessGroup) -> Preparation:
    """How text becomes tokens: by the model's tokenizer, once for all ranks, into the run's folder."""
    tokenizer = tokenizer_folder(config.model, config.training)
    folder = Path(config.job.dump_folder) / TEXT_INDEXES
    return Preparation(tokenizer, folder, once=partial(on_first, group), say=note)


def train_loader(
    config: Config, meshes: Meshes, preparation: Preparation, *, vocab_size: int, group: dist.ProcessGroup
) -> Loader:
    """This rank's part of the data; a step's samples at once, accumulation cuts them later."""
    batch = meshes["batch"]
    return open_training_data(
        config.training,
        preparation,
        vocab_size=vocab_size,
        on_each=partial(on_each, group),
        global_batch_size=samples_per_step(config.training, batch.size()),
        dp_rank=batch.get_local_rank(),
        dp_degree=batch.size(),
        seed=config.debug.seed or 0,
        pin_memory=config.dataloader.pin_memory,
    )


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


def is_saved(step: int, settings: Checkpoint, *, is_last: bool) -> bool:
    """Whether a checkpoint is due after this step."""
    is_due = is_last or step % settings.interval == 0 or (step == 1 and settings.enable_first_step_checkpoint)
    return is_saving(settings) and is_due


def not_finite(step: int, result: StepResult) -> str:
    return f"step {step}: loss is {result.loss}, gradient norm is {result.grad_norm}; the update was not made"


def numerical_fault(step: int, result: StepResult, checkpoints: Checkpoints) -> NumericalFault:
    try:
        checkpoints.finish()  # the save under way counts, if it comes to anything
    except TitanError as error:
        note(f"WARNING: {error.message}")
    good = checkpoints.last_good_step
    return NumericalFault(
        not_finite(step, result),
        hint=f"the last good checkpoint is step {good}" if good is not None else "there is no checkpoint to go back to",
        tries=[
            "--optimizer.lr LOWER",
            "--lr_scheduler.warmup_steps MORE",
            "--training.on_nonfinite skip, to leave such updates out",
        ],
    )


def preempted(step: int, checkpoints: Checkpoints) -> Preempted:
    if checkpoints.last_good_step != step:
        return Preempted(
            f"stopped on request after step {step}; nothing was saved: checkpoint.enable or load_only forbids saving"
        )
    return Preempted(f"stopped on request after step {step}, which is saved", tries=["the same command, to go on"])
