"""Storage for stock `dcp.load` and `dcp.save`: nothing is unpickled, and every byte is checksummed.

The reader serves any TensorSource (a DCP, or a native view of a foreign format) box by box; the writer makes the same
items as `converters` does, with their true CRC32, and fsyncs them.
"""

import dataclasses
import io
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from converters.common.box import Box, TensorSource, row_blocks
from converters.common.crc import crc32
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, TitanError, list_offenders
from converters.common.names import DCP_METADATA
from converters.containers.dcp_item import blob_item, item_shell, read_blob_item
from converters.containers.dcp_metadata import dump_metadata
from converters.containers.dcp_names import RANK_BLOB_FILE, RANK_FILE
from converters.store.digest import TensorDigest, has_whole_rows
from converters.store.manifest import FileSum
from converters.store.output import Output, SummedFile
from converters.views.catalog import UNLOCATED, Catalog, Chunk, Item, TensorEntry, Value
from trainer.checkpoints.arrays import as_array, as_tensor, dtype_name

_MAX_ITEM_BYTES = 256 << 20
_READ_BLOCK_BYTES = 64 << 20  # a read's buffer, however large the shard it fills


def as_titan_error(what: str, error: CheckpointException) -> TitanError:
    """Unwrap DCP's exception: the first TitanError among the ranks' errors, or one that lists the others."""
    causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
    for cause in causes.values():
        if isinstance(cause, TitanError):
            return cause
    messages = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items()]
    return CheckpointError(what + ":" + list_offenders(messages))


class SourceReader(StorageReader):
    """A TensorSource as a DCP storage: each rank reads exactly the boxes that it holds."""

    def __init__(
        self,
        source: TensorSource,
        *,
        values: Collection[str],
        read_blob: Callable[[str], bytes],
        keep: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ):
        """`read_blob` returns a non-tensor item's bytes. `keep(target, values)` gets what is read of each tensor."""
        self._source = source
        self._values = values
        self._read_blob = read_blob
        self._keep = keep

    def read_metadata(self) -> Metadata:
        """Every tensor as one chunk: the source reads any box of it, so the chunks on disk need not show."""
        entries: dict[str, Any] = {
            fqn: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, info.dtype)),
                torch.Size(info.shape),
                [ChunkStorageMetadata(torch.Size([0] * len(info.shape)), torch.Size(info.shape))],
            )
            for fqn, info in self._source.tensors.items()
        }
        return Metadata(entries | {fqn: BytesStorageMetadata() for fqn in self._values}, planner_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._read_blob(item.storage_index.fqn)))
            else:
                self._fill(item, planner)
        return _done(None)

    def _fill(self, item: ReadItem, planner: LoadPlanner) -> None:
        fqn, target = item.storage_index.fqn, planner.resolve_tensor(item).detach()
        dtype = self._source.tensors[fqn].dtype
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if box.num_elements:  # FSDP leaves empty shards on the ranks that a short tensor does not reach
            for block in row_blocks(box, itemsize(dtype), _READ_BLOCK_BYTES):
                self._keep(target[block.slices_within(box)], as_tensor(self._source.read(fqn, block), dtype))
        planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class PlainPlanner(DefaultLoadPlanner):
    """Loads a flat state dict; what is no tensor must be a plain value. Stock planners unpickle it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        self.original_state_dict[fqn] = read_blob_item(value.getvalue(), what=fqn)


@dataclass(frozen=True, slots=True)
class _Written:
    """The location of a written item, of which `.metadata` is made."""

    fqn: str
    file: str
    item: tuple[int, int]  # (offset, length) in the file
    dtype: str = ""  # of a tensor
    shape: tuple[int, ...] = ()  # the whole tensor's
    box: Box | None = None  # the part of it in this item; None for a plain value


class CheckpointWriter(StorageWriter):
    """Writes a rank's tensors into one file and its plain values into another, and `.metadata` from the coordinator.

    Afterwards `files` holds size and CRC32 of each file that this rank wrote, and `digests` its part of the digest of
    each tensor that it holds whole rows of.
    """

    def __init__(self, output: Output, *, rank: int):
        self.files: dict[str, FileSum] = {}
        self.digests: dict[str, TensorDigest] = {}
        self._output = output
        self._rank = rank
        self._sources: dict[tuple[str, torch.Size], tuple[WriteItem, Box]] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Cut large tensors into row blocks: stock readers hold whole items, and so does the copy from a GPU."""
        return dataclasses.replace(plan, items=[block for item in plan.items for block in self._cut(item)])

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        if item.tensor_data is None:
            yield item
            return
        whole = _box_of(item)
        for block in row_blocks(whole, item.tensor_data.properties.dtype.itemsize, _MAX_ITEM_BYTES):
            offsets = torch.Size(block.offsets)
            self._sources[item.index.fqn, offsets] = item, whole
            chunk = ChunkStorageMetadata(offsets, torch.Size(block.sizes))
            index = dataclasses.replace(item.index, offset=offsets)
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            kind = item.type if block == whole else WriteItemType.SHARD  # others must be the only ones of their name
            yield dataclasses.replace(item, index=index, type=kind, tensor_data=data)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        blobs = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO and _holds_values(item)]
        results: list[WriteResult] = []
        for name, items, write in ((RANK_FILE, tensors, self._write_tensor), (RANK_BLOB_FILE, blobs, _write_blob)):
            if items:
                with SummedFile(self._output, name.format(rank=self._rank)) as file:
                    results += [write(file, item, planner) for item in items]
                self.files[file.name] = FileSum(file.size, file.crc32)
        return _done(results)

    def _write_tensor(self, file: SummedFile, item: WriteItem, planner: SavePlanner) -> WriteResult:
        assert item.tensor_data is not None
        shape, box = tuple(item.tensor_data.size), _box_of(item)
        source, whole = self._sources[item.index.fqn, item.tensor_data.chunk.offsets]
        values = planner.resolve_data(source)
        assert isinstance(values, torch.Tensor)
        array = as_array(values[box.slices_within(whole)])
        dtype, raw = dtype_name(item.tensor_data.properties.dtype), array.reshape(-1).view(np.uint8).data
        start = file.size
        head, tail = item_shell(dtype, box.sizes, crc32(raw))
        for part in (head, raw, tail):
            file.write(part)
        if has_whole_rows(box, shape):
            digest = self.digests.setdefault(item.index.fqn, TensorDigest(dtype, shape))
            digest.update(box, array)
        written = _Written(item.index.fqn, file.name, (start, file.size - start), dtype, shape, box)
        return WriteResult(index=item.index, size_in_bytes=array.nbytes, storage_data=written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        items = [result.storage_data for rank in results for result in rank]
        chunks: dict[str, list[_Written]] = defaultdict(list)
        for item in items:
            if item.box is not None:
                chunks[item.fqn].append(item)
        tensors = {
            fqn: TensorEntry(fqn, parts[0].dtype, parts[0].shape, _chunks(parts)) for fqn, parts in chunks.items()
        }
        values = {item.fqn: Value(item=Item(item.file, *item.item)) for item in items if item.box is None}
        catalog = Catalog(self._output.store, "dcp", tensors, values, dict(metadata.planner_data or {}))
        with SummedFile(self._output, DCP_METADATA) as file:
            file.write(dump_metadata(catalog))
        self.files[file.name] = FileSum(file.size, file.crc32)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _write_blob(file: SummedFile, item: WriteItem, planner: SavePlanner) -> WriteResult:
    start = file.size
    assert isinstance(planner, DefaultSavePlanner)
    file.write(blob_item(planner.lookup_object(item.index)))
    written = _Written(item.index.fqn, file.name, (start, file.size - start))
    return WriteResult(index=item.index, size_in_bytes=file.size - start, storage_data=written)


def _box_of(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _holds_values(item: WriteItem) -> bool:
    """False for the empty shards that a short tensor leaves on some ranks; an empty tensor as such is kept."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() > 0 or item.tensor_data.size.numel() == 0


def _chunks(parts: Iterable[_Written]) -> tuple[Chunk, ...]:
    return tuple(Chunk(part.box, part.file, UNLOCATED, (), item=part.item) for part in parts if part.box is not None)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
