"""Check what a run needs before it starts: this machine, its folders, tokenizer, data, checkpoints. Torch-free.

`titan train` makes these checks before any rank starts, `titan config check` makes the same. Ranks repeat those whose
answer may differ on another machine or change in between.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, ConfigError, TitanError, list_offenders
from converters.common.names import DATALOADER
from converters.model.model_info import ModelInfo
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.store.location import Location
from converters.store.outputs import require_space
from trainer.checkpoints.export_plan import export_folders, look_at_exports
from trainer.checkpoints.problems import bytes_of_state, checkpoint_folder, initial_path, is_saving
from trainer.checkpoints.recorded import first_recorded, read_data_position
from trainer.checkpoints.resumable import has_intact_small_files, refuse_not_resumable, refuse_unfit_step
from trainer.checkpoints.run_lock import refuse_other_run
from trainer.checkpoints.step_folders import (
    list_steps,
    no_usable_step,
    refuse_foreign,
    size_problem,
    step_folder,
    steps_aside,
    steps_to_load,
)
from trainer.job.chosen_model import (
    chosen_model,
    refuse_other_form,
    refuse_other_model,
    selected_by_setting,
)
from trainer.job.dump_folder import check_config_file, try_dump_folder
from trainer.job.hardware import check_hardware
from trainer.job.memory_bound import is_in_gpus, too_large_for_host
from trainer.job.record import Job
from trainer.job.resume import resumed_job
from trainer.models.objectives import get_objective
from trainer.objective import InputCheck
from trainer.ranks.machine import Device

_Check = Callable[[], str | None]  # raises a TitanError, or returns what it could not check


@dataclass(slots=True)
class Checked:
    """A run that nothing was found against, but what is listed."""

    job: Job  # with what a resumed run keeps of its checkpoint
    resumes_from: Location | None = None
    too_large: TitanError | None = None  # for the memory of this machine
    not_here: list[TitanError] = field(default_factory=list)  # what else this machine lacks
    open_points: list[str] = field(default_factory=list)  # what could not be checked


class _Inputs:
    """A job's model with its tokenizer as several checks need it, read once: a large one takes a second."""

    def __init__(self, job: Job):
        self.job = job

    @cached_property
    def info(self) -> ModelInfo:
        return chosen_model(self.job)


def check_run(job: Job, device: Device | None, *, has_all_files: bool = True) -> Checked:
    """Raise what training would refuse: one error, or a ConfigError that lists them. Leaves nothing behind.

    `device`: of this machine's ranks; None if it is not known without torch, which is then not installed.
    `has_all_files`: otherwise a missing file that only a preset or a default names counts as not checked.
    """
    refused: dict[str, TitanError] = {}
    checked, inputs = Checked(job), _Inputs(job)
    open_points: dict[str, None] = {}
    for keys, check in _checks(job, inputs):
        try:
            if left_open := check():
                open_points[left_open] = None
        except TitanError as error:
            if has_all_files or any(not job.config.origins.get(key, "preset").startswith("preset") for key in keys):
                refused.setdefault(error.message, error)
            else:
                open_points[f"{error.message} (named by a default or a preset)"] = None
    if not refused:  # what a checkpoint is compared with is known to be right
        try:
            checked.job, checked.resumes_from = _check_start(job, inputs)
        except TitanError as error:
            refused[error.message] = error
    raise_all([*refused.values()])
    has_gpus = device is not None and device.type == "cuda"
    if not is_in_gpus(job, has_gpus=has_gpus):
        checked.too_large = too_large_for_host(job)
    for check in _machine_checks(job, device):
        try:
            if left_open := check():
                open_points[left_open] = None
        except TitanError as error:
            checked.not_here.append(error)
    checked.open_points = [*open_points]
    return checked


def raise_all(errors: list[TitanError]) -> None:
    """Raise one error as it is, and several as one."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(
            f"training would fail, {len(errors)} problems:" + list_offenders([error.message for error in errors]),
            tries=list(dict.fromkeys(line for error in errors for line in error.tries)),
        )


def _checks(job: Job, inputs: _Inputs) -> Iterator[InputCheck]:
    """Checks, each with the config keys that it depends on."""
    yield ("job.dump_folder",), partial(_check_folders, job)
    yield ("model.hf_assets_path",), partial(_check_tokenizer, inputs)
    yield from get_objective(job.family.name).input_checks(job)
    yield ("checkpoint.last_save_in_hf", "checkpoint.last_save_in_torchtune"), partial(_check_exports, inputs)


def _machine_checks(job: Job, device: Device | None) -> Iterator[_Check]:
    """Checks that depend on this machine: another one may run the job."""
    config = job.config

    def disk() -> None:
        num_bytes = bytes_of_state(job.num_parameters, itemsize(config.training.dtype))
        require_space(checkpoint_folder(config), num_bytes)

    def hardware() -> str:
        try:
            if device is not None:
                check_hardware(config, device)
                return ""
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
        return "this machine's GPUs and compiler: torch is not installed"

    if is_saving(config.checkpoint):
        yield disk
    yield hardware


def _check_folders(job: Job) -> None:
    config = job.config
    dump_folder = Path(config.job.dump_folder)
    try_dump_folder(dump_folder)
    check_config_file(config)
    if is_saving(config.checkpoint):
        refuse_foreign(checkpoint_folder(config))
        refuse_other_run(checkpoint_folder(config))


def _check_tokenizer(inputs: _Inputs) -> None:
    _ = inputs.info


def _check_exports(inputs: _Inputs) -> None:
    config = inputs.job.config
    folders = export_folders(Path(config.job.dump_folder), config.checkpoint)
    look_at_exports(folders, inputs.info, dtype=config.checkpoint.export_dtype)


def _check_start(job: Job, inputs: _Inputs) -> tuple[Job, Location | None]:
    """The job, with what it keeps of the checkpoint that it goes on from, and its path; None if the run is new."""
    config, settings = job.config, job.config.checkpoint
    folder, initial = checkpoint_folder(config), initial_path(settings, config.model)
    if settings.enable and steps_aside(folder):  # of a killed save, which the run puts back first
        return job, None
    steps = steps_to_load(folder, list_steps(folder), settings.load_step) if settings.enable else []
    if not steps and not initial:
        return job, None
    wanted, excluded = inputs.info, settings.exclude_from_loading
    problems = {path: size_problem(path) for path in (step_folder(folder, step) for step in steps)}
    whole = [path for path, problem in problems.items() if not problem]
    if whole and not has_intact_small_files(whole[0]):
        return job, None
    if whole:
        refuse_unfit_step(whole[0], wanted, config)
    elif problems:
        raise no_usable_step(folder, [f"{path.name}: {problem}" for path, problem in problems.items()])
    elif initial:
        select = settings.initial_load_select
        with selected_by_setting(), open_native(initial, select=select, otherwise=wanted) as weights:
            refuse_other_model(weights.info, wanted, initial)
            if settings.initial_load_model_only:
                refuse_other_form(weights, initial, settings)
            else:
                catalog = open_checkpoint(initial, select=select)
                refuse_not_resumable(catalog, info=wanted, excluded=excluded)
                whole = [initial]
    objective = get_objective(job.family.name)
    if whole and DATALOADER not in excluded:
        position: dict[str, Any] = {}
        with suppress(CheckpointError):  # a damaged file: loading takes the step before
            position = read_data_position(whole[0])
        if position:
            objective.check_position(job, position)
    if recorded := first_recorded(whole, excluded=excluded, units_per_sample=objective.units_per_sample(job)):
        job = resumed_job(job, recorded, say=lambda line: None)
    return job, whole[0] if whole else None
