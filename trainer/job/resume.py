"""Settings that a resumed run keeps of its checkpoint, and those that its config changes.

A layout is no setting: a run goes on in any, with the same numbers. All else that can change them is recorded in each
checkpoint (`train_state.settings`) and compared.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from converters.common.errors import CheckpointError, ConfigError
from converters.common.names import OPTIMIZER
from converters.model.model_info import ModelInfo
from converters.store.location import Location
from trainer.checkpoints.recorded import BATCH, NUM_STREAMS, OPTIMIZER_KIND, Recorded
from trainer.config.load import origins
from trainer.config.sections import Config, Training
from trainer.config.show import toml_text
from trainer.data.kinds import C4, divisors, streams_of
from trainer.data.position import RESTART_DATA
from trainer.job.record import Job, multiples_near
from trainer.models.objectives import get_objective
from trainer.objective import READ_BY_SOME
from trainer.observability.log import note
from trainer.parallel.float8 import is_float8

_NO_SETTINGS = (  # sections and keys that change no number beyond rounding
    "job.",
    "profiling.",
    "metrics.",
    "parallelism.",
    "checkpoint.",
    "activation_checkpoint.",
    "comm.",
    "experimental.",
    "training.dataloader.",
    "validation.dataloader.",
    "training.local_batch_size",
    "training.enable_cpu_offload",
    "training.gc_",
    "model.print_after_conversion",
    "model.hf_assets_path",  # the tokenizer in it counts
)


def settings_of(job: Job, info: ModelInfo) -> dict[str, Any]:
    """The settings of a run that its checkpoints record, by config key, with what unset ones stand for; plain values.

    Reads the tokenizer's files if the objective reads text.
    """
    config, training, objective = job.config, job.config.training, get_objective(job.family.name)
    unread = {*READ_BY_SOME} - {*objective.reads}
    settings = {
        key: setting.value
        for key, setting in origins(config).items()
        if not key.startswith(_NO_SETTINGS) and key not in unread
    }
    settings |= {
        BATCH: job.samples_per_step,
        "lr_scheduler.total_steps": config.lr_scheduler.total_steps or training.steps,
        "optimizer.state_dtype": config.optimizer.state_dtype or training.dtype,
        "debug.seed": job.seed,
        **objective.settings(job, info.assets),
    }
    unused = _unused(config)
    used = {key: value for key, value in settings.items() if not key.startswith(unused)}
    return dict(json.loads(as_text(used)))  # as it is read again: lists for tuples


def as_text(settings: Mapping[str, Any]) -> str:
    """Settings as they are saved."""
    return json.dumps(settings, sort_keys=True)


def resumed_job(job: Job, recorded: Recorded, *, say: Callable[[str], None] = note) -> Job:
    """The job with the checkpoint's global batch and number of streams if the config does not set them.

    `say` gets a line for each. Raises ConfigError if the ranks cannot divide them, and for another kind of optimizer.
    """
    _refuse_other_optimizer(job.config, recorded)
    training = job.config.training
    if recorded.left_batch not in (None, job.samples_per_step):
        say(
            f"{BATCH} = {job.samples_per_step} in this new run, not {recorded.left_batch} as up to"
            f" {recorded.path.name}: checkpoint.exclude_from_loading has train_state"
        )
    batch, num_streams = recorded.settings.get(BATCH), recorded.settings.get(NUM_STREAMS)
    if training.global_batch_size == -1:
        if batch is None and recorded.is_partial:
            say(
                f"{recorded.path} does not say how many samples its steps had; they have {job.samples_per_step} now:"
                " training.global_batch_size sets the number"
            )
        elif batch not in (None, job.samples_per_step):
            job = _with_batch(job, batch, recorded, say)
    if num_streams and streams_of(training, job.dims.batch) and training.dataset_streams is None:
        job = _with_streams(job, num_streams, recorded, say)
    return job


def say_changes(recorded: Recorded, settings: Mapping[str, Any]) -> None:
    """Print a line for each setting that differs from the checkpoint's."""
    was = recorded.settings
    if recorded.is_partial:
        known = ", ".join(key for key in settings if key in was) or "none"
        note(f"{recorded.path} does not record its run's settings; those that its other values imply: {known}")
    for key, now in settings.items():
        if key in was and was[key] != now:
            note(f"changed since {recorded.path.name}: {key} = {_shown(now)}, was {_shown(was[key])}")


def refuse_other_job(job: Job, built: Job, path: Location) -> None:
    """Raise CheckpointError if a checkpoint keeps another batch than that of the damaged one that was looked at."""
    if job.config.training != built.config.training:
        raise CheckpointError(
            f"{path.name} was loaded in place of a damaged step and had {job.samples_per_step} samples per step; this"
            f" run was built for the damaged one's {built.samples_per_step}",
            tries=[f"--checkpoint.load_step {path.name.rpartition('-')[2]}"],
        )


def _with_batch(job: Job, batch: int, recorded: Recorded, say: Callable[[str], None]) -> Job:
    local, degree = job.config.training.local_batch_size, job.dims.batch
    if batch % (local * degree):
        tries = [
            f"--{BATCH} {size}, to go on with another global batch" for size in multiples_near(batch, local * degree)
        ]
        if fitting := _local_batch(job, batch):
            tries.insert(0, f"--training.local_batch_size {fitting}, to keep {batch} samples per step")
        raise ConfigError(
            f"the run had {batch} samples per step up to {recorded.path.name}, which is not a multiple of"
            f" {local * degree} (local_batch_size × data-parallel degree {degree})",
            hint=f"{BATCH} is unset, so the run keeps its global batch",
            tries=tries,
        )
    resumed = _replaced(job, replace(job.config.training, global_batch_size=batch))
    say(
        f"{BATCH} = {batch} is kept from {recorded.path.name}: {resumed.num_accumulated} forward and backward passes "
        f"per step, of {local} samples on each of {degree} data-parallel rank{'s' if degree > 1 else ''}"
    )
    return resumed


def _local_batch(job: Job, batch: int) -> int | None:
    """The largest smaller local batch with which the ranks divide a global batch."""
    per_rank, rest = divmod(batch, job.dims.batch)
    unit = job.microbatch_size if job.dims.pp > 1 else 1
    sizes = range(unit, job.config.training.local_batch_size, unit)
    return None if rest else max((size for size in sizes if per_rank % size == 0), default=None)


def _with_streams(job: Job, num_streams: int, recorded: Recorded, say: Callable[[str], None]) -> Job:
    degree = job.dims.batch
    if num_streams % degree:
        raise ConfigError(
            f"the run reads c4 in {num_streams} streams up to {recorded.path.name}, which a data-parallel degree of"
            f" {degree} does not divide; degrees that do: {divisors(num_streams)}",
            hint="each stream has its own part of the text and its own position, so their number cannot change",
            tries=[f"{RESTART_DATA}, to start the data from the beginning"],
        )
    say(f"{NUM_STREAMS} = {num_streams} is kept from {recorded.path.name}")
    return _replaced(job, replace(job.config.training, dataset_streams=num_streams))


def _refuse_other_optimizer(config: Config, recorded: Recorded) -> None:
    was, excluded = recorded.settings.get(OPTIMIZER_KIND), config.checkpoint.exclude_from_loading
    if was in (None, config.optimizer.name) or OPTIMIZER in excluded:
        return
    raise ConfigError(
        f"{recorded.path.name} was trained with {was}, and is to be resumed with {config.optimizer.name}",
        hint="the moments of one optimizer are not those of another",
        tries=[
            f"--{OPTIMIZER_KIND} {was}",
            f"--checkpoint.exclude_from_loading {','.join((*excluded, OPTIMIZER))}, to start with new moments",
        ],
    )


def _replaced(job: Job, training: Training) -> Job:
    return replace(job, config=replace(job.config, training=training))


def _unused(config: Config) -> tuple[str, ...]:
    """The beginnings of keys of features that are switched off."""
    is_on = {
        "quantize.": is_float8(config.model),
        "validation.": config.validation.enable,
        NUM_STREAMS: config.training.dataset == C4,
    }
    return tuple(beginning for beginning, used in is_on.items() if not used)


def _shown(value: Any) -> str:
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list) else toml_text(value)
