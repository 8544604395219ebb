"""Open safetensors as a catalog: one file, or a folder with an index. Headers only."""

import re
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import lru_cache
from math import prod
from typing import Any

from converters.common.box import Box
from converters.common.dtypes import BY_SAFETENSORS, itemsize
from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.common.names import HF_INDEX, HF_SINGLE
from converters.containers.base import Container, Listing, name_some
from converters.containers.sniff import refuse_foreign_files
from converters.containers.tensor_pickle import row_major
from converters.store.base import Store, read_bytes
from converters.store.json_file import parse_json, read_json
from converters.store.location import Location
from converters.store.paths import checked_file_name
from converters.views.catalog import Catalog, Chunk, TensorEntry
from converters.views.cover import require_cover

_SHARDING = "DCP_SHARDING_INFO"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def open_file(store: Store, name: str) -> Catalog:
    """The catalog of one safetensors file."""
    if is_shard(name) and (number := len([other for other in store.names() if is_shard(other)])) > 1:
        raise CheckpointError(
            f"{store.location / name}: one of {number} shards, each with a part of the tensors",
            hint="give the folder of all of them",
            tries=[str(store.location)],
        )
    return Catalog(store, "safetensors", read_file(store, name), file=name)


def read_catalog(store: Store, entry: str = "") -> Catalog:
    """The catalog of a folder of safetensors.

    `entry`: the file or index that lists the folder's tensors and their files; without one the folder holds one file.
    """
    if entry.endswith(".json"):
        return Catalog(store, "safetensors", read_indexed(store, entry, read_file))
    path = store.location
    names = [entry] if entry else [name for name in store.names() if name.endswith(".safetensors")]
    if not entry and names and all(map(is_shard, names)):
        return Catalog(store, "safetensors", _join_shards(store, names))
    _refuse_ranks(path, names)
    require_series(path, names)
    if len(names) != 1:
        raise CheckpointError(
            f"{path}: {len(names)} safetensors files and no {HF_INDEX}",
            hint="without the index a missing file would not be noticed",
            tries=[] if any(map(is_of_series, names)) else [str(path / name) for name in names[:2]],
        )
    return Catalog(store, "safetensors", read_file(store, names[0]), file=names[0])


def _refuse_ranks(folder: Location, names: Sequence[str]) -> None:
    """Raise UnsupportedError for files that DeepSeek's convert.py wrote for several ranks: parts under one name."""
    ranks = {int(found[1]) for name in names if (found := re.fullmatch(r"model\d+-mp(\d+)\.safetensors", name))}
    if ranks - {1}:
        raise UnsupportedError(
            f"{folder}: shards of {max(ranks)} ranks, as DeepSeek's inference code reads them, are not joined",
            hint="convert the checkpoint that they were made of, or run its convert.py with --model-parallel 1",
        )


def is_shard(name: str) -> bool:
    """Whether a file is one of DCP's HuggingFaceStorageWriter(save_distributed=True): a rank's parts of tensors."""
    return fnmatch(name, "shard-*-model-*.safetensors")


def _join_shards(store: Store, names: list[str]) -> dict[str, TensorEntry]:
    """Each tensor with its parts in all files; the caller checks that they cover it."""
    joined: dict[str, TensorEntry] = {}
    problems = []
    for name in names:
        for fqn, part in read_file(store, name).items():
            entry = joined.setdefault(fqn, replace(part, chunks=()))
            if (entry.dtype, len(entry.shape)) != (part.dtype, len(part.shape)):
                problems.append(f"{fqn}: {part.dtype} {list(part.shape)} in {name}, {entry.dtype} in other files")
                continue
            shape = tuple(map(max, entry.shape, part.shape))
            joined[fqn] = replace(entry, shape=shape, chunks=(*entry.chunks, *part.chunks))
    if problems:
        raise CheckpointError(f"{store.location}: the shards disagree:{list_offenders(problems)}")
    return joined


def read_indexed(
    store: Store, name: str, read_file: Callable[[Store, str], dict[str, TensorEntry]]
) -> dict[str, TensorEntry]:
    """The tensors that an index names, compared with those that its files have; `read_file` opens a file."""
    weight_map, index = read_weight_map(store, name), store.location / name
    files: dict[str, None] = {}
    problems: list[str] = []
    for file in {str(file): file for file in weight_map.values()}.values():
        try:
            files[checked_file_name(file, what=name)] = None
        except CheckpointError as error:
            problems.append(error.message)
    if problems:  # before any file is opened
        raise CheckpointError(
            f"{index}: refused, it leads out of its folder:{list_offenders(problems)}",
            hint="files of a checkpoint are in one folder, under plain names",
        )
    tensors: dict[str, TensorEntry] = {}
    unsupported: list[str] = []
    for file in files:
        try:
            entries = read_file(store, file)
        except UnsupportedError as error:
            unsupported.append(error.message)
            continue
        except CheckpointError as error:
            problems.append(error.message + (f" ({error.hint})" if error.hint else ""))
            continue
        for fqn, entry in entries.items():
            if fqn in tensors:
                problems.append(f"{fqn}: in both {tensors[fqn].chunks[0].file} and {file}")
            elif fqn not in weight_map:
                problems.append(f"{fqn}: in {file}, but not in the index")
            elif weight_map[fqn] != file:
                problems.append(f"{fqn}: in {file}, but the index says {weight_map[fqn]}")
            tensors[fqn] = entry
    forgotten = _forgotten_files(store, files)
    problems += [f"{name}: of the same series as the others, but not in the index" for name in forgotten]
    if not problems and unsupported:
        raise UnsupportedError(f"{store.location}: files hold what is not covered:{list_offenders(unsupported)}")
    if not problems:
        problems = [f"{fqn}: not in {file}" for fqn, file in weight_map.items() if fqn not in tensors]
    if problems:
        raise CheckpointError(
            f"{index}: the index and the files disagree:{list_offenders(problems)}",
            hint="an incomplete or mixed download; fetch the folder again",
        )
    return {fqn: tensors[fqn] for fqn in weight_map}


def read_weight_map(store: Store, index: str) -> dict[str, Any]:
    """Tensor name → file, from an index; the names are not checked."""
    store.size(index)  # refuses links that lead out
    weight_map = read_json(store.local([index]) / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{store.location / index}: has no weight_map")
    return weight_map


_SERIES = re.compile(r"(.*)-(\d+)(-of-(\d+)\.\w+)")
_MOST_FILES = 10_000  # of a series; a name may claim any number
_ONLY_ONE = re.compile(r".*-of-0*1\.\w+")


def is_of_series(name: str) -> bool:
    """Whether a file is one of several, by its name (model-00002-of-00003.safetensors)."""
    return _SERIES.fullmatch(name) is not None and not _ONLY_ONE.fullmatch(name)


def require_series(folder: Location, names: Collection[str]) -> None:
    """Raise CheckpointError for files of a series (model-00001-of-00003) if others are missing, by their names."""
    matches = [match.groups() for name in names if (match := _SERIES.fullmatch(name))]
    first = min((int(number) for _, number, _, _ in matches), default=1) and 1  # some tools count from 0
    missing: dict[str, None] = {}
    for stem, number, middle, length in matches:
        numbers = range(first, first + min(int(length), _MOST_FILES))
        series = (f"{stem}-{n:0{len(number)}}{middle}" for n in numbers)
        missing |= dict.fromkeys(name for name in series if name not in names)
    if missing:
        raise CheckpointError(
            f"{folder}: files are missing, by the names of the others:{list_offenders(list(missing))}",
            hint="an incomplete download or copy; fetch the folder again",
        )


def index_remarks(store: Store, num_bytes: int) -> list[str]:
    """Remarks on harmless errors of an index; `num_bytes`: of all tensors."""
    names = store.names()
    if HF_INDEX not in names or HF_SINGLE in names:
        return []
    metadata = read_json(store.local([HF_INDEX]) / HF_INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None or total == num_bytes:
        return []
    return [f"{HF_INDEX}: says total_size {total!r:.40}, the tensors take {num_bytes}"]


def _forgotten_files(store: Store, named: Collection[str]) -> list[str]:
    """Files of the same series that the index does not name: they are from another save."""
    series = {match.group(1, 3) for name in named if (match := _SERIES.fullmatch(name))}
    beside = sorted(set(store.names()) - set(named))
    return [name for name in beside if (match := _SERIES.fullmatch(name)) and match.group(1, 3) in series]


def read_file(store: Store, name: str) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. All rules of the format are checked: no hole, overlap or trailing byte."""
    path, size = store.location / name, store.size(name)
    header, data_offset = _read_header(store, name, size)
    tensors: dict[str, TensorEntry] = {}
    extents: list[tuple[int, int, str]] = []
    problems: list[str] = []
    unsupported: list[str] = []
    sharding = _sharding(header.pop("__metadata__", None), path)
    for fqn, item in header.items():
        try:
            dtype, shape, begin, end = _checked_entry(item)
            offsets = _offsets(sharding, fqn, len(shape))
        except UnsupportedError as error:
            unsupported.append(f"{fqn}: {error.message}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error) if type(error) is ValueError else "not a dtype, a shape and two data_offsets"
            problems.append(f"{fqn}: {reason}")
        else:
            box, strides, ends = _placed(offsets, shape)
            chunk = Chunk(box, name, data_offset + begin, strides)
            tensors[fqn] = TensorEntry(fqn, dtype, ends, (chunk,))
            extents.append((begin, end, fqn))
    if unsupported and not problems:
        raise UnsupportedError(f"{path}: element types that are not covered:{list_offenders(unsupported)}")
    position = 0
    for begin, end, fqn in sorted(extents):
        if begin != position:
            what = "a hole" if begin > position else "an overlap"
            problems.append(f"{what} in front of {fqn} (it begins at byte {begin:,}, expected {position:,})")
        position = end
    if problems:
        raise CheckpointError(f"{path}: damaged safetensors header:{list_offenders(problems)}")
    if data_offset + position != size:
        raise CheckpointError(
            f"{path}: {size:,} bytes, but the header describes {data_offset + position:,}",
            hint="the file was truncated or extended; fetch it again",
        )
    return tensors


def _sharding(metadata: Any, path: Location) -> dict[str, Any]:
    """The offsets of a file's parts in their tensors, from DCP's writer; {} for a file of whole tensors."""
    raw = metadata.get(_SHARDING) if isinstance(metadata, dict) else None
    return parse_json(raw.encode(), what=f"{path}: {_SHARDING}") if isinstance(raw, str) else {}


def _offsets(sharding: dict[str, Any], fqn: str, num_dims: int) -> tuple[int, ...]:
    if not sharding:
        return (0,) * num_dims
    if fqn not in sharding:
        raise ValueError(f"{_SHARDING} has no saved_offsets of it")
    offsets = tuple(sharding[fqn]["saved_offsets"])
    if len(offsets) != num_dims or any(type(n) is not int or n < 0 for n in offsets):
        raise ValueError(f"saved_offsets {str(offsets):.60}")
    return offsets


@lru_cache(maxsize=4096)
def _placed(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...], tuple[int, ...]]:
    """Box, strides and ends of a part; the same objects for the many tensors of one shape."""
    return Box(offsets, shape), row_major(shape), tuple(map(int.__add__, offsets, shape))


def _checked_entry(item: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of a header's entry."""
    begin, end = item["data_offsets"]
    shape = tuple(item["shape"])
    if any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
        raise ValueError(f"offsets {str(item['data_offsets']):.60}, shape {str(item['shape']):.60}")
    dtype = BY_SAFETENSORS.get(item["dtype"])
    if dtype is None:
        raise UnsupportedError(f"{item['dtype']!r:.60}")
    if end - begin != prod(shape) * itemsize(dtype):
        raise ValueError(f"{end - begin:,} bytes for shape {str(list(shape)):.60} of {dtype}")
    return dtype, shape, begin, end


def _read_header(store: Store, name: str, size: int) -> tuple[dict[str, Any], int]:
    path = store.location / name
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for safetensors")
    length = struct.unpack("<Q", read_bytes(store, name, 0, 8))[0]
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(
            f"{path}: a header of {length:,} bytes in a file of {size:,}",
            hint="the file is truncated, or not safetensors",
        )
    raw = read_bytes(store, name, 8, length)
    if not raw.startswith(b"{"):  # a BOM or spaces in front: other readers refuse them, too
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    return parse_json(raw, what=str(path)), 8 + length


def _find(files: Listing) -> str:
    if files.entry:
        return files.entry if files.entry.endswith((".safetensors", ".safetensors.index.json")) else ""
    return name_some(files.ending(".safetensors"))


def _open_folder(files: Listing) -> Catalog:
    one_file = files.entry.endswith(".safetensors")
    refuse_foreign_files(files.store, [files.entry] if one_file else files.ending(".safetensors"))
    return require_cover(read_catalog(files.store, files.entry))


SAFETENSORS = Container(
    name="safetensors",
    called="a Hugging Face checkpoint (safetensors)",
    title="safetensors",
    suffixes=(".safetensors",),
    replaceable=("*.safetensors",),
    find=_find,
    open_folder=_open_folder,
    has_checksums=False,
    rules="no hole, overlap or trailing byte",
    index_remarks=index_remarks,
    is_for_transformers=True,
)
