"""Write one checkpoint folder atomically, all ranks together.

Stock `dcp.save` writes into a temporary sibling folder; the manifest is written last, then the folder is renamed.
"""

import socket
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from converters.common.box import Box, row_blocks
from converters.common.collector import collector_paused
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError
from converters.common.names import ASSETS_FOLDER, DCP_METADATA
from converters.containers.dcp import read_complete
from converters.containers.registry import replaceable
from converters.engine.read import CatalogReader
from converters.model.model_info import ModelInfo, write_model_info
from converters.store.digest import TensorDigest, has_whole_rows
from converters.store.location import Location, Place, locate
from converters.store.manifest import TensorSum
from converters.store.output import Output, write_manifest
from converters.store.outputs import checked, run_outputs_at
from converters.tokenizers.assets import write_assets
from converters.views.catalog import Catalog, TensorEntry
from converters.views.cover import overlap, require_cover
from trainer.checkpoints.failed_saves import SaveFailed
from trainer.checkpoints.io import CheckpointWriter, as_titan_error
from trainer.checkpoints.step_folders import retire, step_folder
from trainer.ranks.agree import on_each, on_first

_READ_BACK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class StepToSave:
    """A step to write and which older ones to keep, in plain values, so that it can be pickled."""

    step: int
    folder: Location  # that holds the run's step folders
    info: ModelInfo
    keep: int  # 0: all
    damaged: frozenset[int]  # older steps


def save_step(
    todo: StepToSave, nested: Mapping[str, Any], *, group: dist.ProcessGroup, planner: SavePlanner | None = None
) -> None:
    """Write a step atomically, then delete those beyond `keep`; all ranks of `group` together.

    Raises SaveFailed on all ranks if the step was not written.
    """
    try:
        write_step(step_folder(todo.folder, todo.step), nested, info=todo.info, group=group, planner=planner)
    except CheckpointError as error:
        raise SaveFailed(error.message, hint=error.hint, tries=error.tries) from error
    if todo.keep:
        on_first(group, lambda: retire(todo.folder, keep=todo.keep, newest=todo.step, damaged=todo.damaged))


def write_step(
    destination: Place,
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
    location = locate(destination)
    outputs = run_outputs_at(location)
    identifier = on_first(group, lambda: outputs.prepare(location))
    output = checked(outputs.shared(location, identifier, marker=DCP_METADATA), location)
    try:
        writer = CheckpointWriter(output, rank=group.rank())
        try:
            save(dict(nested), storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            raise as_titan_error(f"cannot save {destination}", error) from error
        written = on_each(group, lambda: writer.files)
        files = {name: file_sum for part in written for name, file_sum in part.items()}
        tensors = _digest(output, writer, group=group)

        def complete() -> None:
            write_model_info(output.folder, info)
            write_assets(output.folder / ASSETS_FOLDER, info.assets, info.generation)
            write_manifest(output, tensors=tensors, files=files)
            output.commit(overwrite=True, marks=replaceable())

        on_first(group, complete)
    except BaseException:
        if group.rank() == 0:
            output.discard()
        raise


def _digest(output: Output, writer: CheckpointWriter, *, group: dist.ProcessGroup) -> dict[str, TensorSum]:
    """Digests of all tensors: the sum over the ranks' rows. Rows that several ranks hold a part of are read back."""
    opened: list[Catalog] = []

    def open_output() -> tuple[str, list[str]]:
        with collector_paused():
            opened.append(require_cover(read_complete(output.store)))
        return socket.gethostname(), [*writer.files]

    # All ranks agree on the outcome; otherwise one that fails would leave the others waiting
    nodes = on_each(group, open_output)
    (catalog,) = opened
    digests = {fqn: TensorDigest(entry.dtype, entry.shape) for fqn, entry in catalog.tensors.items()}

    work, is_read_back = _rows_to_read(catalog, nodes)

    def own_part() -> dict[str, int]:
        partial = {fqn: digest.partial for fqn, digest in writer.digests.items() if fqn not in is_read_back}
        with CatalogReader(catalog) as reader:
            for fqn, rows in work[group.rank()]:
                entry = catalog.tensors[fqn]
                digest = TensorDigest(entry.dtype, entry.shape)
                for block in row_blocks(rows, itemsize(entry.dtype), _READ_BACK_BYTES):
                    digest.update(block, reader.read(fqn, block))
                partial[fqn] = partial.get(fqn, 0) + digest.partial
        return partial

    for part in on_each(group, own_part):
        for fqn, value in part.items():
            digests[fqn].add_partial(value)
    return {fqn: TensorSum(digest.dtype, digest.shape, digest.hexdigest()) for fqn, digest in digests.items()}


def _rows_to_read(
    catalog: Catalog, nodes: Sequence[tuple[str, Collection[str]]]
) -> tuple[list[list[tuple[str, Box]]], set[str]]:
    """By rank, the rows of which chunks have parts, and the tensors that are read back as a whole.

    `nodes`: node and files of each rank. A rank reads rows that its own node has written, from its page cache; if
    several nodes have, as under tensor parallelism across nodes, rows of which its node has written a part.
    """
    node_of = {file: node for node, files in nodes for file in files}
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, (node, _) in enumerate(nodes):
        ranks_of[node].append(rank)
    work: list[list[tuple[str, Box]]] = [[] for _ in nodes]
    num_bytes, whole = [0] * len(nodes), set()
    for fqn, entry in sorted(catalog.tensors.items()):
        parts: dict[Box, set[str]] = defaultdict(set)  # rows → nodes that have written a part of them
        for chunk in entry.chunks:
            if not has_whole_rows(chunk.box, entry.shape):
                rows = Box((*chunk.box.offsets[:-1], 0), (*chunk.box.sizes[:-1], entry.shape[-1]))
                parts[rows].add(node_of[chunk.file])
        if parts and not _complete_the_tensor(entry, [*parts]):  # cut unevenly: a row would be added twice
            parts = {Box.whole(entry.shape): set().union(*parts.values())}
            whole.add(fqn)
        for rows, writers in parts.items():
            rank = min((rank for node in sorted(writers) for rank in ranks_of[node]), key=lambda rank: num_bytes[rank])
            work[rank].append((fqn, rows))
            num_bytes[rank] += rows.num_elements * itemsize(entry.dtype)
    return work, whole


def _complete_the_tensor(entry: TensorEntry, rows: Sequence[Box]) -> bool:
    """Whether `rows` and the chunks of whole rows cover the tensor exactly."""
    boxes = [*rows, *(chunk.box for chunk in entry.chunks if has_whole_rows(chunk.box, entry.shape))]
    return sum(box.num_elements for box in boxes) == prod(entry.shape) and not overlap(boxes)
