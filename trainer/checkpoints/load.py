"""Load a checkpoint into a run, all ranks together; nothing is changed before all of it is verified."""

import filecmp
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from converters.assets import CLASS_DEFAULTS
from converters.catalog import Box, Catalog, TensorSource
from converters.dtypes import DTYPES
from converters.engine.read import CatalogReader
from converters.errors import CheckpointError, list_offenders
from converters.families.registry import get_family
from converters.manifest import changed_since, check_files, read_manifest
from converters.model_info import ModelInfo, describes_model, read_model_info
from converters.names import (
    DATALOADER,
    OPTIMIZER,
    RNG,
    SECTIONS,
    TIKTOKEN_MODEL,
    TOKENIZER_JSON,
    TRAIN_STATE,
    section_of,
)
from converters.open import open_checkpoint
from converters.training.optimizer_state import is_number
from converters.weights import naming_of, open_native
from trainer.agree import on_each, on_first
from trainer.checkpoints.fit import refuse_misfits
from trainer.checkpoints.io import PlainPlanner, SourceReader, as_titan_error
from trainer.checkpoints.run_state import RunState
from trainer.chosen_model import refuse_other_model, refuse_other_names
from trainer.data.tokenizer import load_tokenizer, tokenizes_differently
from trainer.observability.log import note

_LATER = ("ntokens_seen", "skipped_steps")  # of train_state: missing in torchtitan's and in titan's first checkpoints
_OPTIONAL = f"{TRAIN_STATE}.wandb_run_id"  # only in checkpoints of runs that log to Weights & Biases
_RANKS_LOADER = f"{DATALOADER}.dp_rank_"  # torchtitan's, a pickle for each data-parallel rank


def load_state(
    path: Path, state: RunState, *, info: ModelInfo, excluded: Collection[str], group: dist.ProcessGroup
) -> ModelInfo:
    """Load everything from a DCP except the `excluded` sections. Returns the checkpoint's model information."""
    catalog = open_checkpoint(path)
    for text in catalog.notes:
        note(f"{path}: {text}")
    _refuse_not_resumable(catalog, path, info=info, excluded=excluded)
    found = read_model_info(path, catalog) if describes_model(path) else info  # torchtitan's own do not
    refuse_other_model(found, info, path)
    wanted: dict[str, Any] = dict(state.model.state_dict())
    for section, values in state.sections().items():
        if section in excluded:
            note(f"not loaded from {path}: {section}")
            continue
        wanted |= {f"{section}.{key}": value for key, value in values.items() if _is_loaded(section, key)}
    if _OPTIONAL in catalog.blobs and TRAIN_STATE not in excluded:
        wanted[_OPTIONAL] = ""
    unknown = [k for k in (*catalog.blobs, *catalog.tensors) if section_of(k) == TRAIN_STATE and k not in wanted]
    if unknown and TRAIN_STATE not in excluded:
        note(f"not loaded from {path}, unknown to titan: {', '.join(sorted(unknown))}")
    has_rng = _has_rng_of_each_rank(catalog.tensors, group.size())
    # a device that the saving run did not have has no saved state
    wanted = {k: v for k, v in wanted.items() if section_of(k) != RNG or (has_rng and k in catalog.tensors)}
    with CatalogReader(catalog) as reader:
        counters = _counters(reader, wanted, path)
        wanted = {key: value for key, value in wanted.items() if key not in counters}
        loaded = counters | _fill(
            wanted, reader, catalog.blobs, reader.read_blob, path=path, may_cast=False, also=set(counters), group=group
        )
    sections: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        sections.setdefault(section_of(key), {})[key.partition(".")[2]] = value
    state.take(sections)
    return found


def load_weights(path: Path, state: RunState, *, info: ModelInfo, only_hf: bool, group: dist.ProcessGroup) -> ModelInfo:
    """Load the weights of a checkpoint of any format; with `only_hf` other names than Hugging Face's are refused.

    Each rank reads only its own boxes, and casts from other floating dtypes. Returns the checkpoint's model
    information.
    """
    with open_native(path, otherwise=info) as weights:
        if only_hf:
            refuse_other_names(weights, path)
        for text in weights.catalog.notes:
            note(f"{path}: {text}")
        _refuse_damaged(weights.catalog, group)
        refuse_other_model(weights.info, info, path)
        if group.rank() == 0 and (text := other_tokenizer(weights.info, info, path)):
            note(text)
        _fill(state.model.state_dict(), weights.source, {}, _no_blob, path=path, may_cast=True, group=group)
        return weights.info


def refuse_damaged(path: Path, *, info: ModelInfo, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError where an initial checkpoint is damaged or of another model."""
    with open_native(path, otherwise=info) as weights:
        _refuse_damaged(weights.catalog, group)
        refuse_other_model(weights.info, info, path)


def changed_files(path: Path, group: dist.ProcessGroup) -> str:
    """Compare every file of a manifest with its CRC32, ranks sharing the files; "" where all agree."""
    rank, world = group.rank(), group.size()

    def check_share() -> list[str]:
        manifest = read_manifest(path)
        return check_files(path, sorted(manifest.files)[rank::world], manifest=manifest) if manifest else []

    return "; ".join(problem for share in on_each(group, check_share) for problem in share)


def _refuse_damaged(catalog: Catalog, group: dist.ProcessGroup) -> None:
    """Check files by the manifest's CRC32s, and files without one by their items' own.

    This is a separate pass, although loading reads the bytes again: a rank that found damage while loading would stop
    with half of its weights replaced. Here all ranks agree before the first copy.
    """
    rank, world, path = group.rank(), group.size(), catalog.root
    listed = on_first(group, lambda: _listed_files(path))
    unlisted = sorted(fqn for fqn, t in catalog.tensors.items() if not {chunk.file for chunk in t.chunks} <= listed)

    def check_share() -> list[str]:
        with CatalogReader(catalog) as reader:
            return [problem for fqn in unlisted[rank::world] for problem in reader.record_problems(fqn)]

    if changed := changed_files(path, group) if listed else "":
        raise changed_since(path, [changed])
    if problems := [p for share in on_each(group, check_share) for p in share]:
        raise CheckpointError(f"{path} is damaged:" + list_offenders(problems), tries=[f"titan verify {path}"])


def _listed_files(path: Path) -> set[str]:
    """The files that a manifest lists; none where there is no manifest, as in other tools' checkpoints."""
    manifest = read_manifest(path) if path.is_dir() else None
    return set(manifest.files) if manifest else set()


def _refuse_not_resumable(catalog: Catalog, path: Path, *, info: ModelInfo, excluded: Collection[str]) -> None:
    """Raise CheckpointError where this kind of checkpoint cannot provide a section that is not excluded."""
    if catalog.container != "dcp":
        raise CheckpointError(
            f"{path} holds only weights ({catalog.container}); initial_load_model_only = false needs the whole state",
            tries=["--checkpoint.initial_load_model_only"],
        )
    naming = naming_of(catalog, get_family(info.family))
    if any(rule.foreign != rule.native for rule in naming.rules):
        raise CheckpointError(
            f"{path} has {naming.name} names for weights and optimizer; a run resumes from native names",
            tries=[
                f"titan reshard {path} NATIVE_CHECKPOINT, which renames both",
                "--checkpoint.initial_load_model_only",
            ],
        )
    asked = [section for section in SECTIONS if section not in excluded and section != RNG]
    if asked and not catalog.blobs and all(section_of(fqn) == "model" for fqn in catalog.tensors):
        raise CheckpointError(
            f"{path} holds only weights, so a run cannot resume from it: no {', '.join(asked)}",
            hint="checkpoint.last_save_model_only = true saves the last step so; a finished run cannot resume",
            tries=[
                "--checkpoint.load_step EARLIER, to resume from an earlier step",
                f"--job.dump_folder NEW_FOLDER --checkpoint.initial_load_path {path}, to start a run with its weights",
            ],
        )
    num_ranks = sum(name.startswith(_RANKS_LOADER) for name in catalog.blobs)
    if num_ranks and DATALOADER not in excluded:
        raise CheckpointError(
            f"{path} has torchtitan's data position: a pickle for each of {num_ranks} data-parallel ranks, which titan "
            "does not execute, and which does not apply to titan's data",
            hint="everything else can be resumed; the data then starts from the beginning",
            tries=[f"--checkpoint.exclude_from_loading {','.join((*excluded, DATALOADER))}"],
        )


def _counters(reader: CatalogReader, wanted: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Numbers of train_state that are saved as tensors (torchtitan's, by stock DCP), or that are missing."""
    found: dict[str, Any] = {}
    for key in (key for key in wanted if section_of(key) == TRAIN_STATE):
        if key in reader.tensors and is_number(reader.tensors[key]):
            value = reader.read(key, Box((), ()))
            found[key] = float(value) if DTYPES[reader.tensors[key].dtype].is_floating else int(value)
    if f"{TRAIN_STATE}.step" in (*found, *reader.catalog.blobs):
        for key in (f"{TRAIN_STATE}.{name}" for name in _LATER):
            if key in wanted and key not in (*found, *reader.catalog.blobs, *reader.tensors):
                note(f"{path} has no {key}: it is counted from 0")
                found[key] = 0
    return found


def other_tokenizer(found: ModelInfo, wanted: ModelInfo, path: Path) -> str:
    """A warning if the tokenizer of initial weights tokenizes differently from the run's; else ""."""
    theirs, ours = (
        next((info.assets[name].parent for name in (TOKENIZER_JSON, TIKTOKEN_MODEL) if name in info.assets), None)
        for info in (found, wanted)
    )
    if theirs is None or ours is None or theirs == ours:
        return ""
    if not tokenizes_differently(load_tokenizer(theirs), load_tokenizer(ours)):
        return ""
    return f"WARNING: {path} has a tokenizer that gives other ids than the run's, in {ours}"


def not_carried(found: ModelInfo, wanted: ModelInfo) -> list[str]:
    """Files and token ids of initial weights that the run's checkpoints do not get; the config names theirs."""
    theirs, ours = found.assets, wanted.assets
    lost = sorted(theirs.keys() - ours.keys())
    for name in sorted(theirs.keys() & ours.keys()):
        if not filecmp.cmp(theirs[name], ours[name], shallow=False):
            lost.append(f"{name} (the run has another)")
    for key, id in found.token_ids.items():
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
    blobs: Mapping[str, Any],
    read_blob: Callable[[str], bytes],
    *,
    path: Path,
    may_cast: bool,
    also: Collection[str] = (),
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Fill the tensors of a flat state dict and return it with plain values replaced; `also`: keys already read."""
    tensors = {fqn: info for fqn, info in source.tensors.items() if fqn not in also}
    refuse_misfits(wanted, tensors, blobs, group=group, path=path, may_cast=may_cast)
    loaded = dict(wanted)
    reader = SourceReader(source, blobs=blobs, read_blob=read_blob)
    try:
        dcp_load(loaded, storage_reader=reader, planner=PlainPlanner(), process_group=group)
    except CheckpointException as error:
        raise as_titan_error(f"cannot load {path}", error) from error
    return loaded


def _no_blob(fqn: str) -> bytes:
    raise AssertionError(f"{fqn}: weights are tensors")
