"""Check what a run reads and writes before it starts: dump folder, tokenizer, data, initial checkpoint."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from converters.errors import ConfigError, TitanError, list_offenders
from converters.weights import open_native
from trainer.checkpoints.problems import initial_path
from trainer.checkpoints.step_folders import list_steps
from trainer.chosen_model import (
    chosen_model,
    refuse_other_form,
    refuse_other_model,
    selected_by_setting,
    tokenizer_folder,
)
from trainer.data.datasets import check_dataset
from trainer.data.document_ends import with_end_token
from trainer.data.index import HELD_OUT, TRAIN
from trainer.dump_folder import try_dump_folder
from trainer.job import Job

_DATA_KEYS = ("dataset", "dataset_path", "dataset_mix")


def check_inputs(job: Job) -> list[str]:
    """Raise ConfigError with everything that training would refuse; returns what could not be checked.

    A missing file that only a preset or a default names counts as not checked.
    """
    refused: dict[str, TitanError] = {}
    open_points: dict[str, None] = {}
    for keys, check in _checks(job):
        try:
            if left_open := check():
                open_points[left_open] = None
        except TitanError as error:
            if any(not job.config.origins.get(key, "preset").startswith("preset") for key in keys):
                refused.setdefault(error.message, error)
            else:
                open_points[f"{error.message} (named by a default or a preset)"] = None
    if len(refused) == 1:
        raise next(iter(refused.values()))
    if refused:
        raise ConfigError(
            f"training would fail, {len(refused)} problems:" + list_offenders([*refused]),
            tries=list(dict.fromkeys(line for error in refused.values() for line in error.tries)),
        )
    return [*open_points]


def _checks(job: Job) -> Iterator[tuple[tuple[str, ...], Callable[[], str | None]]]:
    """Checks, each with the config keys that it depends on."""
    config = job.config
    training, validation = config.training, config.validation

    def check_data(name: str, path: str | None, section: str) -> str:
        tokenizer, split = tokenizer_folder(config.model, config.training), TRAIN if section == "training" else HELD_OUT
        return check_dataset(
            name,
            path,
            split=split,
            vocab_size=job.args.vocab_size,
            tokenizer=tokenizer,
            needs_offsets=job.documents.needs_offsets,
        )

    yield ("training.document_mask",), lambda: _check_end_token(job)
    yield ("job.dump_folder",), lambda: try_dump_folder(Path(config.job.dump_folder))
    yield ("model.hf_assets_path",), lambda: _check_tokenizer(job)
    for section, settings in (("training", training), ("validation", validation)):
        if section == "validation" and not validation.enable:
            continue
        keys = tuple(f"{section}.{key}" for key in _DATA_KEYS) + (
            ("validation.enable",) if settings is validation else ()
        )
        for path in dict(settings.dataset_mix) or (settings.dataset_path,):
            yield keys, partial(check_data, settings.dataset, path, section)
    yield ("checkpoint.initial_load_path",), lambda: _check_initial(job)


def _check_tokenizer(job: Job) -> None:
    chosen_model(job)


def _check_end_token(job: Job) -> None:
    with_end_token(job.documents, tokenizer_folder(job.config.model, job.config.training))


def _check_initial(job: Job) -> None:
    config = job.config
    path = initial_path(config.checkpoint, config.model)
    own = Path(config.job.dump_folder) / config.checkpoint.folder
    if path and not list_steps(own):
        wanted = chosen_model(job)
        select = config.checkpoint.initial_load_select
        with selected_by_setting(), open_native(path, select=select, otherwise=wanted) as weights:
            refuse_other_model(weights.info, wanted, path)
            refuse_other_form(weights, path, config.checkpoint)
