"""Open safetensors as a catalog: one file, or a folder with an index. Headers only."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from converters.catalog import Box, Catalog, Chunk, TensorEntry
from converters.dtypes import BY_SAFETENSORS, itemsize
from converters.errors import CheckpointError, UnsupportedError, in_words, list_offenders
from converters.formats.paths import checked_file_name, checked_file_size
from converters.formats.tensor_pickle import row_major
from converters.names import HF_INDEX, HF_SINGLE

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 256 << 20


def read_catalog(path: Path) -> Catalog:
    """The catalog of a `.safetensors` file or of a folder of them.

    A folder with an index is what the index says, file by file and key by key; a folder without one holds one file.
    """
    if path.is_file():
        return Catalog(path.parent, "safetensors", read_file(path.parent, path.name))
    index = path / HF_INDEX
    if index.exists():
        return Catalog(path, "safetensors", _read_indexed(path, index))
    single = path / HF_SINGLE
    names = [HF_SINGLE] if single.exists() else sorted(p.name for p in path.glob("*.safetensors"))
    if len(names) != 1:
        raise CheckpointError(
            f"{path}: {len(names)} safetensors files and no {HF_INDEX}",
            hint="without the index nobody can tell whether a file is missing",
            tries=[str(path / name) for name in names[:2]],
        )
    return Catalog(path, "safetensors", read_file(path, names[0]))


def _read_indexed(folder: Path, index: Path) -> dict[str, TensorEntry]:
    checked_file_size(folder, index.name)
    content = read_json(index, max_bytes=_MAX_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    files: dict[str, None] = {}
    for file in weight_map.values():
        files[checked_file_name(file, what=str(index))] = None
    found: dict[str, TensorEntry] = {}
    problems: list[str] = []
    for file in files:
        try:
            entries = read_file(folder, file)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        for fqn, entry in entries.items():
            if fqn in found:
                problems.append(f"{fqn}: in both {found[fqn].chunks[0].file} and {file}")
            elif fqn not in weight_map:
                problems.append(f"{fqn}: in {file}, but not in the index")
            elif weight_map[fqn] != file:
                problems.append(f"{fqn}: in {file}, but the index says {weight_map[fqn]}")
            found[fqn] = entry
    if not problems:
        problems = [f"{fqn}: not in {file}" for fqn, file in weight_map.items() if fqn not in found]
    if problems:
        raise CheckpointError(f"{index}: the index and the files disagree:{list_offenders(problems)}")
    return {fqn: found[fqn] for fqn in weight_map}


def read_file(folder: Path, name: str) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. All rules of the format are checked: no hole, overlap or trailing byte."""
    path = folder / name
    size = checked_file_size(folder, name)
    header, data_offset = _read_header(path, size)
    tensors: dict[str, TensorEntry] = {}
    extents: list[tuple[int, int, str]] = []
    try:
        header.pop("__metadata__", None)
        for fqn, item in header.items():
            begin, end = item["data_offsets"]
            shape = tuple(item["shape"])
            if any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
                raise ValueError(f"{fqn}: offsets {item['data_offsets']}, shape {item['shape']}")
            dtype = BY_SAFETENSORS.get(item["dtype"])
            if dtype is None:
                raise UnsupportedError(f"{path}: {fqn} has the element type {item['dtype']!r}, which is not covered")
            if end - begin != prod(shape) * itemsize(dtype):
                raise ValueError(f"{fqn}: {end - begin} bytes for shape {shape} of {dtype}")
            chunk = Chunk(Box.whole(shape), name, data_offset + begin, row_major(shape))
            tensors[fqn] = TensorEntry(fqn, dtype, shape, (chunk,))
            extents.append((begin, end, fqn))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header ({in_words(error)})") from error
    position = 0
    for begin, end, fqn in sorted(extents):
        if begin != position:
            raise CheckpointError(f"{path}: a hole or an overlap in front of {fqn} (byte {begin}, expected {position})")
        position = end
    if data_offset + position != size:
        raise CheckpointError(
            f"{path}: {size:,} bytes, but the header describes {data_offset + position:,}",
            hint="the file was cut off or something was appended to it; fetch it again",
        )
    return tensors


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{path}: {size} bytes are too few for safetensors")
        length = struct.unpack("<Q", start)[0]
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"{path}: a header of {length:,} bytes in a file of {size:,}",
                hint="the file is cut off, or not safetensors at all",
            )
        raw = file.read(length)
    header = parse_json(raw, what=str(path))
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is no JSON object")
    return header, 8 + length


def read_json(path: Path, *, max_bytes: int) -> Any:
    """A JSON file of at most `max_bytes`, checked as `parse_json` does."""
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(f"{path}: {size:,} bytes, more than the {max_bytes:,} that are plausible")
    return parse_json(path.read_bytes(), what=str(path))


def parse_json(raw: bytes, *, what: str) -> Any:
    """JSON in which no key stands twice: "last one wins" would hide a tensor."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            keys = [key for key, _ in pairs]
            raise CheckpointError(f"{what}: key {next(k for k in keys if keys.count(k) > 1)!r} appears twice")
        return content

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: not valid JSON ({in_words(error)})") from error
