"""Load a checkpoint into a run, all ranks together; nothing is changed before all of it is verified.

Each rank reads its part into host memory, sums it, and copies it to its tensors once all ranks have agreed that every
file has its CRC32. If a node lacks the memory for a copy of its ranks' parts, the files are read twice instead.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from converters.common.box import Box, TensorInfo, TensorSource
from converters.common.dtypes import DTYPES, itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import (
    OPTIMIZER,
    RNG,
    TIKTOKEN_MODEL,
    TOKENIZER_JSON,
    TRAIN_STATE,
    section_of,
)
from converters.containers.dcp import DCP
from converters.conversion.trained_by import foreign_remark
from converters.engine.read import CatalogReader
from converters.model.model_info import ModelInfo, describes_model, read_model_info
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.store.base import Store, open_store
from converters.store.local_files import have_same_bytes
from converters.store.location import Location, Place
from converters.store.manifest import Manifest, changed_since, check_files, check_sizes
from converters.tokenizers.assets import CLASS_DEFAULTS
from converters.tokenizers.tokenizer import load_tokenizer, tokenizes_differently
from converters.training.optimizer_state import is_number
from converters.views.catalog import Catalog
from trainer.checkpoints.fit import refuse_misfits
from trainer.checkpoints.io import PlainPlanner, SourceReader, as_titan_error
from trainer.checkpoints.read_sums import ReadSums
from trainer.checkpoints.recorded import SETTINGS
from trainer.checkpoints.resumable import refuse_not_resumable
from trainer.checkpoints.run_state import RunState
from trainer.config.sections import Checkpoint
from trainer.job.chosen_model import refuse_other_form, refuse_other_model, selected_by_setting
from trainer.observability.log import note
from trainer.ranks.agree import on_each, on_first
from trainer.ranks.machine import available_bytes, machine_identity
from trainer.ranks.mesh import local_part

_LATER = ("ntokens_seen", "skipped_steps")  # of train_state: missing in torchtitan's and in titan's first checkpoints
_OPTIONAL = (f"{TRAIN_STATE}.wandb_run_id", SETTINGS)  # of runs that log to Weights & Biases; not in titan's first ones
_MEMORY_SHARE = 0.8  # of a node's available memory that copies of its ranks' parts may take
T = TypeVar("T")


class DamagedFiles(CheckpointError):
    """Files of a checkpoint differ from its manifest. Raised on all ranks, before anything was changed."""

    def __init__(self, place: Location, problems: Sequence[str]):
        error = changed_since(place, problems)
        super().__init__(error.message, hint=error.hint, tries=error.tries)
        self.problems = problems


def load_state(
    path: Location,
    state: RunState,
    *,
    info: ModelInfo,
    excluded: Collection[str],
    group: dist.ProcessGroup,
    select: str | None = None,
) -> ModelInfo:
    """Load everything from a DCP except the `excluded` sections. Returns the checkpoint's model information.

    `select`: the model, if the checkpoint holds several.

    Raises DamagedFiles if files differ from the manifest.
    """
    store, _ = open_store(path)
    manifest = _manifest_of(store, group)
    small = {name for name in manifest.files if not DCP.is_data(name)}
    _refuse_changed(store, manifest, small, group)  # before they are parsed, as the plain values below
    with selected_by_setting():
        catalog = open_checkpoint(path, select=select)
    _refuse_changed(store, manifest, manifest.files.keys() - small - catalog.tensor_files, group)
    _refuse_damaged_items(catalog, manifest, group)
    for text in filter(None, (*catalog.notes, foreign_remark(catalog, "native", info))):
        note(f"{path}: {text}")
    refuse_not_resumable(catalog, info=info, excluded=excluded)
    saved_info = read_model_info(catalog.root, catalog) if describes_model(catalog.root) else info  # not torchtitan's
    refuse_other_model(saved_info, info, path)
    wanted: dict[str, Any] = dict(state.model.state_dict())
    for section, values in state.sections().items():
        if section in excluded:
            note(f"not loaded from {path}: {section}")
            continue
        wanted |= {f"{section}.{key}": value for key, value in values.items() if _is_loaded(section, key)}
    if TRAIN_STATE not in excluded:
        wanted |= {key: "" for key in _OPTIONAL if key in catalog.values}
    unknown = [k for k in catalog.names if section_of(k) == TRAIN_STATE and k not in wanted]
    if unknown and TRAIN_STATE not in excluded:
        note(f"not loaded from {path}, unknown to titan: {', '.join(sorted(unknown))}")
    has_rng = _has_rng_of_each_rank(catalog.tensors, group.size())
    # a device that the saving run did not have has no saved state
    wanted = {k: v for k, v in wanted.items() if section_of(k) != RNG or (has_rng and k in catalog.tensors)}
    with CatalogReader(catalog) as reader:
        counters = _or_damaged(store, manifest, group, lambda: on_each(group, lambda: _counters(reader, wanted, path)))
        wanted = {key: value for key, value in wanted.items() if key not in counters[0]}
        loaded = counters[0] | _fill(wanted, reader, reader, manifest, may_cast=False, also=counters[0], group=group)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        sections.setdefault(section_of(key), {})[key.partition(".")[2]] = value
    state.take(sections)
    return saved_info


def load_weights(
    path: Place, state: RunState, *, info: ModelInfo, settings: Checkpoint, group: dist.ProcessGroup
) -> ModelInfo:
    """Load the weights of a checkpoint of any format that `settings` allow.

    Each rank reads only its own boxes, and casts from other floating dtypes; quantized weights from float32, as
    torchtitan's reader. Returns the checkpoint's model information.
    """
    with selected_by_setting():
        opened = open_native(path, select=settings.initial_load_select, otherwise=info, dequantized="float32")
    with opened as weights:
        refuse_other_form(weights, path, settings)
        foreign = foreign_remark(weights.catalog, weights.naming, info)
        for text in filter(None, (*weights.notes, *weights.info.notes, foreign)):
            note(f"{path}: {text}")
        manifest = _manifest_of(weights.catalog.store, group)
        _refuse_damaged_items(weights.catalog, manifest, group)
        refuse_other_model(weights.info, info, path)
        if group.rank() == 0 and (text := other_tokenizer(weights.info, info, path)):
            note(text)
        _fill(state.model.state_dict(), weights.source, weights.reader, manifest, may_cast=True, group=group)
        return weights.info


def _manifest_of(store: Store, group: dist.ProcessGroup) -> Manifest:
    """The manifest; an empty one if there is none, as in other tools' checkpoints."""
    manifest = on_first(group, lambda: check_sizes(store))
    return manifest or Manifest({}, {})


def _refuse_changed(store: Store, manifest: Manifest, names: Iterable[str], group: dist.ProcessGroup) -> None:
    """Raise DamagedFiles if one of these files does not have the manifest's CRC32. Ranks share the files."""
    rank, world, shared = group.rank(), group.size(), sorted(names)
    shares = on_each(group, lambda: check_files(store, shared[rank::world], manifest=manifest))
    if problems := [problem for share in shares for problem in share]:
        raise DamagedFiles(store.location, problems)


def _or_damaged(store: Store, manifest: Manifest, group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """`work()`. An error that it raises, on all ranks, becomes DamagedFiles if files have changed."""
    try:
        return work()
    except CheckpointError:
        _refuse_changed(store, manifest, manifest.files, group)
        raise


def _refuse_damaged_items(catalog: Catalog, manifest: Manifest, group: dist.ProcessGroup) -> None:
    """Check tensors in files that the manifest does not list by the CRC32s of their items, which are read twice then.

    A rank that found damage while loading would stop with half of its weights replaced. Here all ranks agree first.
    """
    rank, world, path, listed = group.rank(), group.size(), catalog.location, manifest.files.keys()
    unlisted = sorted(fqn for fqn, t in catalog.tensors.items() if not {chunk.file for chunk in t.chunks} <= listed)

    def check_share() -> list[str]:
        with CatalogReader(catalog) as reader:
            return [problem for fqn in unlisted[rank::world] for problem in reader.record_problems(fqn)]

    if problems := [p for share in on_each(group, check_share) for p in share]:
        raise CheckpointError(f"{path} is damaged:" + list_offenders(problems), tries=[f"titan verify {path}"])


def _counters(reader: CatalogReader, wanted: Mapping[str, Any], path: Location) -> dict[str, Any]:
    """Numbers of train_state that are saved as tensors (torchtitan's, by stock DCP), or that are missing."""
    counters: dict[str, Any] = {}
    for key in (key for key in wanted if section_of(key) == TRAIN_STATE):
        if key in reader.tensors and is_number(reader.tensors[key]):
            value = reader.read(key, Box((), ()))
            counters[key] = float(value) if DTYPES[reader.tensors[key].dtype].is_floating else int(value)
    if f"{TRAIN_STATE}.step" in (*counters, *reader.catalog.values):
        for key in (f"{TRAIN_STATE}.{name}" for name in _LATER):
            if key in wanted and key not in (*counters, *reader.catalog.names):
                note(f"{path} has no {key}: it is counted from 0")
                counters[key] = 0
    return counters


def other_tokenizer(saved: ModelInfo, wanted: ModelInfo, path: Place) -> str:
    """A warning if the tokenizer of initial weights tokenizes differently from the run's; else ""."""
    saved_folder, folder = (
        next((info.assets[name].parent for name in (TOKENIZER_JSON, TIKTOKEN_MODEL) if name in info.assets), None)
        for info in (saved, wanted)
    )
    if saved_folder is None or folder is None or saved_folder == folder:
        return ""
    if not tokenizes_differently(load_tokenizer(saved_folder), load_tokenizer(folder)):
        return ""
    return f"WARNING: {path} has a tokenizer that gives other ids than the run's, in {folder}"


def left_out_of_checkpoints(saved: ModelInfo, wanted: ModelInfo) -> list[str]:
    """Files and token ids of initial weights that the run's checkpoints do not get; the config names theirs."""
    saved_assets, assets = saved.assets, wanted.assets
    lost = sorted(saved_assets.keys() - assets.keys())
    for name in sorted(saved_assets.keys() & assets.keys()):
        if not have_same_bytes(saved_assets[name], assets[name]):
            lost.append(f"{name} (the run has another)")
    for key, id in saved.token_ids.items():
        if id not in (wanted.token_ids.get(key), CLASS_DEFAULTS.get(key)):
            lost.append(f"{key} = {id} (the run: {wanted.token_ids.get(key, 'none')})")
    return lost


def _has_rng_of_each_rank(tensors: Mapping[str, Any], num_ranks: int) -> bool:
    num_saved = sum(key.startswith(f"{RNG}.cpu.") for key in tensors)
    if num_saved and num_saved != num_ranks:
        note(f"random number states of {num_saved} ranks do not fit {num_ranks} ranks: they are seeded again")
    return num_saved == num_ranks


def _is_loaded(section: str, key: str) -> bool:
    """False for the optimizer's settings, which come from the config (they are saved for other tools)."""
    if section == RNG:
        return key.rpartition(".")[2] == str(dist.get_rank())
    return not (section == OPTIMIZER and key.startswith("param_groups."))


def _fill(
    wanted: Mapping[str, Any],
    source: TensorSource,
    reader: CatalogReader,
    manifest: Manifest,
    *,
    may_cast: bool,
    also: Collection[str] = (),
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Fill the tensors of a flat state dict and return it with plain values replaced, once all files are verified.

    `reader` reads the files of `source`; `also`: keys already read.
    """
    catalog = reader.catalog
    store = catalog.store
    tensors = {fqn: info for fqn, info in source.tensors.items() if fqn not in also}
    refuse_misfits(wanted, tensors, catalog.values, group=group, path=catalog.place, may_cast=may_cast)
    loaded, sums = dict(wanted), None
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    if manifest.files and _fits_in_memory(wanted, tensors, group):
        sums = ReadSums(reader)
    else:
        _refuse_changed(store, manifest, manifest.files, group)

    def stage(target: torch.Tensor, values: torch.Tensor) -> None:
        staged.append((target, values))

    def read() -> None:
        keep = stage if sums else torch.Tensor.copy_
        storage = SourceReader(source, values=catalog.values, read_blob=reader.read_blob, keep=keep)
        try:
            dcp_load(loaded, storage_reader=storage, planner=PlainPlanner(), process_group=group)
        except CheckpointException as error:
            raise as_titan_error(f"cannot load {catalog.place}", error) from error

    _or_damaged(store, manifest, group, read)
    if sums and (problems := sums.problems(manifest.files, group)):
        raise DamagedFiles(store.location, problems)
    while staged:  # all ranks agree
        target, values = staged.pop()
        target.copy_(values)
    return loaded


def _fits_in_memory(wanted: Mapping[str, Any], tensors: Mapping[str, TensorInfo], group: dist.ProcessGroup) -> bool:
    """Whether every node has memory for a copy of what its ranks read. A note says if one has not.

    Tensors on a CPU count twice: their own memory takes none before it is written to.
    """
    num_local_bytes = sum(
        local_part(value).numel() * itemsize(tensors[fqn].dtype) * (1 if value.is_cuda else 2)
        for fqn, value in wanted.items()
        if isinstance(value, torch.Tensor)
    )
    nodes = on_each(group, lambda: (machine_identity(), num_local_bytes, available_bytes() or 0))
    needed: Counter[tuple[str, str, str]] = Counter()
    for node, num_bytes, _ in nodes:
        needed[node] += num_bytes
    if all(needed[node] <= _MEMORY_SHARE * available for node, _, available in nodes):
        return True
    note("the checkpoint is read twice, first to verify it: a node has no memory for a copy of its ranks' parts")
    return False
