"""The record of a run in its checkpoint: the config's values, or what its other values imply. Torch-free."""

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.common.names import DATALOADER, OPTIMIZER, TRAIN_STATE, section_of
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from converters.store.location import Location
from converters.training.optimizer_state import is_number
from trainer.data.position import STREAMS

SETTINGS = f"{TRAIN_STATE}.settings"  # JSON: the run's settings by config key
BATCH = "training.global_batch_size"
NUM_STREAMS = "training.dataset_streams"
OPTIMIZER_KIND = "optimizer.name"


@dataclass(frozen=True, slots=True)
class Recorded:
    """Settings of the run that wrote a checkpoint, by config key.

    `is_partial`: another tool or an earlier titan wrote it, and these are the few that follow from its other values.
    `left_batch`: samples of its steps, if known, if its progress is not loaded.
    """

    path: Location
    settings: Mapping[str, Any]
    is_partial: bool
    left_batch: int | None = None


def first_recorded(paths: Iterable[Location], *, excluded: Collection[str], units_per_sample: int) -> Recorded | None:
    """The record of the first checkpoint that is whole, as far as its small files say; None if there is none.

    Loading finds what else is wrong, and says why a checkpoint is not used.
    """
    for path in paths:
        with suppress(CheckpointError):
            return read_recorded(path, excluded=excluded, units_per_sample=units_per_sample)
    return None


def read_recorded(path: Location, *, excluded: Collection[str] = (), units_per_sample: int) -> Recorded:
    """The record of a checkpoint. `units_per_sample`: that of the config, for streamed data.

    Without the progress of the run (`excluded`), a new one begins, of which only the optimizer's settings count.
    """
    catalog = open_checkpoint(path)
    with CatalogReader(catalog) as reader:

        def value(key: str) -> Any:
            """A plain value, or a number that is saved as a tensor (stock DCP's); None if there is none."""
            if key in catalog.values:
                return reader.read_value(key)
            if key in reader.tensors and is_number(reader.tensors[key]):
                return reader.read(key, Box((), ())).item()
            return None

        text, has_data = value(SETTINGS), DATALOADER not in excluded
        implied = _of_optimizer(value, (*catalog.values, *reader.tensors))
        fingerprint = value(f"{DATALOADER}.fingerprint")
        if TRAIN_STATE in excluded:
            left_batch = None
            with suppress(CheckpointError):  # it is not loaded, and may be what is damaged
                is_recorded = isinstance(text, str)
                implied_batch = None if is_recorded else _batch(value, fingerprint, units_per_sample)
                left_batch = _parsed(path, text).get(BATCH) if is_recorded else implied_batch
            return Recorded(path, implied, is_partial=False, left_batch=left_batch)
        if isinstance(text, str):
            settings = _parsed(path, text)
            return Recorded(path, settings if has_data else _without_data(settings), is_partial=False)
        if isinstance(fingerprint, str) and fingerprint.endswith(STREAMS):
            implied[NUM_STREAMS] = int(fingerprint.removesuffix(STREAMS).rpartition("/")[2])
        if batch := _batch(value, fingerprint, units_per_sample):
            implied[BATCH] = batch
        return Recorded(path, implied if has_data else _without_data(implied), is_partial=True)


def _parsed(path: Location, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise CheckpointError(f"{path}: {SETTINGS} is damaged: {error}") from None


def read_data_position(path: Location) -> dict[str, Any]:
    """The data loader's state in a checkpoint of titan; empty if it has none that is plain."""
    catalog, state = open_checkpoint(path), dict[str, Any]()
    with CatalogReader(catalog) as reader:
        for key in catalog.values:
            if section_of(key) == DATALOADER and ".dp_rank_" not in key:  # torchtitan's are pickles
                state[key.partition(".")[2]] = reader.read_value(key)
    return state


def _without_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what belongs to a position in the data."""
    return {key: value for key, value in settings.items() if key != NUM_STREAMS}


def _of_optimizer(value: Any, names: Collection[str]) -> dict[str, Any]:
    """The optimizer's settings from those of its first parameter group, which all parameters share."""
    ending = ".betas"
    first = next(
        (name for name in names if name.startswith(f"{OPTIMIZER}.param_groups.") and name.endswith(ending)), ""
    )
    if not first:
        return {}
    group = {key: value(f"{first.removesuffix(ending)}.{key}") for key in _OF_GROUP}
    items: dict[str, Any] = {_OF_GROUP[key]: number for key, number in group.items() if isinstance(number, int | float)}
    if isinstance(kind := items.pop(OPTIMIZER_KIND, None), bool):
        items[OPTIMIZER_KIND] = "AdamW" if kind else "Adam"
    betas = value(first)
    if isinstance(betas, list | tuple) and len(betas) == 2:
        items |= {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}
    return items


_OF_GROUP = {  # torch's names of a group's settings
    "decoupled_weight_decay": OPTIMIZER_KIND,
    "initial_lr": "optimizer.lr",
    "eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
}


def _batch(value: Any, fingerprint: Any, units_per_sample: int) -> int | None:
    """Samples of a step, if the samples and the steps of the run are known and agree with its units; else None.

    They do not if the data was started again, or the batch was another one before.
    """
    step, num_units = value(f"{TRAIN_STATE}.step"), value(f"{TRAIN_STATE}.ntokens_seen")
    positions = value(f"{DATALOADER}.positions")
    consumed = value(f"{DATALOADER}.consumed_samples")
    if isinstance(positions, list | tuple):
        consumed = sum(position[-1] for position in positions)
    elif isinstance(fingerprint, str) and (end := fingerprint.rpartition("/")[2]).isdecimal():
        units_per_sample = int(end)
    if not (step and consumed and num_units) or consumed % step or num_units > consumed * units_per_sample:
        return None
    return int(consumed // step)
