"""Open a torch.save zip (`.pt`, `.pth`, `.bin`) as a catalog: a (nested) dict of tensors and plain values."""

from typing import Any

from converters.common.box import Box
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.containers.dcp_item import check_plain, read_archive, storage_record
from converters.containers.stored_zip import ZipRecord
from converters.containers.tensor_pickle import ByteStream, TensorRef, row_major
from converters.store.base import Store, reading_part
from converters.views.catalog import Catalog, Chunk, TensorEntry, Value


def read_catalog(store: Store, name: str) -> Catalog:
    """The catalog of one torch file. Nested dicts become dotted names; `planner_data` keeps the path of each."""
    size, path = store.size(name), store.location / name
    records, root, prefix = read_archive(reading_part(store, name, 0, size), size, what=str(path))
    if not isinstance(root, dict):
        raise UnsupportedError(f"{path}: holds a {type(root).__name__}, not a dict of tensors")
    catalog = Catalog(store, "torch", {}, file=name)
    refused: list[str] = []
    for keys, value in _leaves(root, ()):
        fqn = ".".join(map(str, keys))
        if fqn in catalog.tensors or fqn in catalog.values:
            raise CheckpointError(f"{path}: two entries are called {fqn!r} once their dicts are flattened")
        if isinstance(value, TensorRef):
            record = storage_record(records, prefix, value, what=str(path))
            catalog.tensors[fqn] = _entry(fqn, value, name, record)
        else:
            value = value.data if isinstance(value, ByteStream) else value
            try:
                check_plain(value, what=fqn)
            except CheckpointError as error:
                refused.append(error.message)
                continue
            catalog.values[fqn] = Value(value)
        catalog.planner_data[fqn] = keys
    if refused:
        raise UnsupportedError(f"{path}: holds more than tensors and plain values:{list_offenders(refused)}")
    return catalog


def _leaves(value: dict[Any, Any], keys: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    pending: list[tuple[tuple[Any, ...], Any]] = [(keys, value)]
    while pending:
        keys, item = pending.pop()
        if isinstance(item, dict) and item and len(keys) < 100:
            pending.extend(((*keys, key), child) for key, child in reversed(item.items()))
        elif type(item) in (list, tuple) and len(keys) < 100 and not _is_plain(item):  # Lightning's optimizer_states
            pending.extend(((*keys, index), child) for index, child in reversed(list(enumerate(item))))
        else:
            leaves.append((keys, item))
        if len(leaves) + len(pending) > 10_000_000:
            raise CheckpointError("a dict of more than ten million entries")
    return leaves


def _is_plain(value: Any) -> bool:
    try:
        check_plain(value, what="")
    except CheckpointError:
        return False
    return True


def _entry(fqn: str, ref: TensorRef, file: str, record: ZipRecord) -> TensorEntry:
    chunk = Chunk(
        Box.whole(ref.shape),
        file,
        record.data_offset + ref.storage_offset * itemsize(ref.dtype),
        ref.strides if 0 not in ref.shape else row_major(ref.shape),
        record.crc32 or None,
        (record.data_offset, record.size),
    )
    return TensorEntry(fqn, ref.dtype, ref.shape, (chunk,))
