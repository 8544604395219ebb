"""Write one checkpoint folder atomically, all ranks together.

Stock `dcp.save` writes into a temporary sibling folder; the manifest is written last, then the folder is renamed.
"""

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from converters.assets import write_assets
from converters.catalog import Box, Catalog
from converters.commit import commit, new_staging
from converters.dtypes import itemsize
from converters.engine.digest import TensorDigest
from converters.engine.read import CatalogReader
from converters.errors import CheckpointError
from converters.layout import row_blocks
from converters.manifest import TensorSum, write_manifest
from converters.model_info import ModelInfo, write_model_info
from converters.names import ASSETS_FOLDER
from converters.open import open_checkpoint
from trainer.agree import on_each, on_first
from trainer.checkpoints.failed_saves import SaveFailed
from trainer.checkpoints.io import CheckpointWriter, as_titan_error
from trainer.checkpoints.step_folders import retire, step_folder

_READ_BACK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class StepToSave:
    """A step to write and which older ones to keep, in plain values, so that it can be pickled."""

    step: int
    folder: Path  # that holds the run's step folders
    info: ModelInfo
    keep: int  # 0: all
    damaged: frozenset[int]  # older steps


def save_step(
    todo: StepToSave, nested: Mapping[str, Any], *, group: dist.ProcessGroup, planner: SavePlanner | None = None
) -> None:
    """Write a step atomically, then delete those beyond `keep`; all ranks of `group` together.

    Raises SaveFailed on all ranks where the step was not written.
    """
    try:
        write_step(step_folder(todo.folder, todo.step), nested, info=todo.info, group=group, planner=planner)
    except CheckpointError as error:
        raise SaveFailed(error.message, hint=error.hint, tries=error.tries) from error
    if todo.keep:
        on_first(group, lambda: retire(todo.folder, keep=todo.keep, newest=todo.step, damaged=todo.damaged))


def write_step(
    destination: Path,
    nested: Mapping[str, Any],
    *,
    info: ModelInfo,
    group: dist.ProcessGroup,
    planner: SavePlanner | None = None,
) -> None:
    """Write a state dict (weights flat, sections nested) as a checkpoint folder; all ranks of `group` together.

    A `planner` may provide the items itself; `nested` is empty then.
    """
    # replicated tensors are written once, all by the lowest rank
    planner = planner or DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    identifier = on_first(group, lambda: uuid.uuid4().hex[:12])
    staging = on_first(group, lambda: new_staging(destination, identifier))
    try:
        writer = CheckpointWriter(staging, rank=group.rank())
        try:
            save(dict(nested), storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            raise as_titan_error(f"cannot save {destination}", error) from error
        written = on_each(group, lambda: writer.files)
        files = {name: file_sum for part in written for name, file_sum in part.items()}
        tensors = _digest(staging, writer, group=group)

        def complete() -> None:
            write_model_info(staging, info)
            write_assets(staging / ASSETS_FOLDER, info.assets, info.generation)
            write_manifest(staging, tensors=tensors, files=files)
            commit(staging, destination, overwrite=True)

        on_first(group, complete)
    except BaseException:
        if group.rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _digest(staging: Path, writer: CheckpointWriter, *, group: dist.ProcessGroup) -> dict[str, TensorSum]:
    """Digests of all tensors: the sum over the ranks' rows; tensors with split rows are read back."""
    opened: list[Catalog] = []
    # All ranks agree on the outcome; otherwise one that fails would leave the others waiting
    on_each(group, lambda: opened.append(open_checkpoint(staging)))
    (catalog,) = opened
    digests = {fqn: TensorDigest(entry.dtype, entry.shape) for fqn, entry in catalog.tensors.items()}
    split = sorted(fqn for fqn, t in catalog.tensors.items() if any(c.box.sizes[1:] != t.shape[1:] for c in t.chunks))

    def own_part() -> dict[str, int]:
        partial = {fqn: digest.partial for fqn, digest in writer.digests.items() if fqn not in split}
        with CatalogReader(catalog) as reader:
            for fqn in split[group.rank() :: group.size()]:
                entry, digest = (
                    catalog.tensors[fqn],
                    TensorDigest(catalog.tensors[fqn].dtype, catalog.tensors[fqn].shape),
                )
                for block in row_blocks(Box.whole(entry.shape), itemsize(entry.dtype), _READ_BACK_BYTES):
                    digest.update(block, reader.read(fqn, block))
                partial[fqn] = digest.partial
        return partial

    for part in on_each(group, own_part):
        for fqn, value in part.items():
            digests[fqn].add_partial(value)
    return {fqn: TensorSum(digest.dtype, digest.shape, digest.hexdigest()) for fqn, digest in digests.items()}
