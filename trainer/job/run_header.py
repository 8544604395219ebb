"""The first lines of a run: what is trained, where, how, and where its results go. Torch-free."""

from collections.abc import Mapping
from pathlib import Path

from converters.common.names import METRICS_FILE
from converters.store.location import Location
from trainer.checkpoints.problems import checkpoint_folder, is_saving
from trainer.config.sections import Config
from trainer.job.inputs import Checked
from trainer.job.record import Job
from trainer.models.objectives import get_objective
from trainer.parallel.float8 import float8_notes, is_float8


def header_lines(checked: Checked, *, device: str) -> list[str]:
    """Aligned lines. `device`: the name of what one rank computes on."""
    job, config = checked.job, checked.job.config
    ranks = job.dims.world_size
    rows = {
        "model": _model(job),
        "mesh": f"{ranks:,} ranks on {device}: {job.dims}" if ranks > 1 else f"1 rank on {device}",
        "step": _step(job),
        "precision": _precision(config),
        "checkpoints": _checkpoints(config, checked.resumes_from),
        "metrics": _metrics(config),
    }
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def notes_of(job: Job, assets: Mapping[str, Path]) -> list[str]:
    """Notes on what is learned, with the tokenizer among `assets`, and on float8."""
    notes = get_objective(job.family.name).notes(job, assets)
    if is_float8(job.config.model):
        notes += float8_notes(job.config.float8, job.config.training, job.args)
    return notes


def _model(job: Job) -> str:
    total, active = job.num_parameters, job.num_active_parameters
    return f"{job.config.model.name} {job.config.model.flavor}, {total:,} parameters" + (
        f", {active:,} active" if active != total else ""
    )


def _step(job: Job) -> str:
    objective = get_objective(job.family.name)
    text = f"{job.samples_per_step:,} sample{'s' if job.samples_per_step > 1 else ''}"
    if (size := objective.units_per_sample(job)) > 1:
        text += f" of {size:,} {objective.unit}: {objective.units_per_step(job):,} {objective.unit}"
    return text + (f", in {job.num_accumulated:,} passes" if job.num_accumulated > 1 else "")


def _precision(config: Config) -> str:
    compute, weights = config.training.mixed_precision_param, config.training.dtype
    float8 = f"float8 ({config.float8.recipe_name or 'tensorwise'}), " if is_float8(config.model) else ""
    return float8 + compute + (f", weights in {weights}" if weights != compute else "")


def _checkpoints(config: Config, resumes_from: Location | None) -> str:
    settings, folder = config.checkpoint, checkpoint_folder(config)
    if not settings.enable:
        return "none: checkpoint.enable is false"
    how = f"every {settings.interval:,} steps" if is_saving(settings) else "only loaded"
    return f"{folder}, {how}" + (f"; resumes from {resumes_from.name}" if resumes_from else "")


def _metrics(config: Config) -> str:
    dump, metrics = Path(config.job.dump_folder), config.metrics
    places = [str(dump / METRICS_FILE)]
    if metrics.enable_tensorboard:
        places.append(f"TensorBoard in {dump / metrics.save_tb_folder}")
    if metrics.enable_wandb:
        places.append("Weights & Biases")
    return ", ".join(places)
