"""Plan a safetensors output: one file, or `model-0000i-of-0000n` with an index, as transformers expects."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from converters.common.box import Box, TensorInfo
from converters.common.dtypes import DTYPES, itemsize
from converters.common.errors import UnsupportedError, list_offenders
from converters.common.names import HF_INDEX, HF_SINGLE
from converters.containers.target import Crc32Of, Slot, Target

DEFAULT_SHARD_BYTES = 5_000_000_000  # the default of transformers


def plan_safetensors(tensors: Mapping[str, TensorInfo], *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Target:
    """A Target with the tensors in their order, in files of at most `shard_bytes` of data (a tensor is never cut)."""
    unknown = [f"{fqn}: {info.dtype}" for fqn, info in tensors.items() if not DTYPES[info.dtype].safetensors]
    if unknown:
        raise UnsupportedError(f"safetensors has no such element type:{list_offenders(unknown)}")
    groups: list[list[str]] = [[]]
    room = shard_bytes
    for fqn, info in tensors.items():
        size = prod(info.shape) * itemsize(info.dtype)
        if size > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(fqn)
        room -= size
    count = len(groups)
    names = [HF_SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    headers: dict[str, bytes] = {}
    slots: list[Slot] = []
    file_bytes: dict[str, int] = {}
    for file, fqns in zip(names, groups, strict=True):
        headers[file], placed, file_bytes[file] = _lay_out(file, fqns, tensors)
        slots += placed
    other_files: dict[str, bytes] = {}
    if count > 1:
        weight_map = {fqn: file for file, fqns in zip(names, groups, strict=True) for fqn in fqns}
        total = sum(slot.num_bytes for slot in slots)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        other_files[HF_INDEX] = json.dumps(content, indent=2).encode() + b"\n"
        file_bytes[HF_INDEX] = len(other_files[HF_INDEX])

    def around(file: str, crc32_of: Crc32Of) -> Iterator[tuple[int, bytes]]:
        yield 0, headers[file]

    return Target(dict(tensors), slots, file_bytes, around, other_files, streamed=True)


def _lay_out(file: str, fqns: Sequence[str], tensors: Mapping[str, TensorInfo]) -> tuple[bytes, list[Slot], int]:
    # Wide types first: then every tensor is aligned to its own element size, whatever precedes it.
    ordered = sorted(fqns, key=lambda fqn: -itemsize(tensors[fqn].dtype))
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    extents = []
    for fqn in ordered:
        info = tensors[fqn]
        size = prod(info.shape) * itemsize(info.dtype)
        content[fqn] = {
            "dtype": DTYPES[info.dtype].safetensors,
            "shape": list(info.shape),
            "data_offsets": [position, position + size],
        }
        extents.append((fqn, position))
        position += size
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    header = struct.pack("<Q", len(raw)) + raw
    slots = [
        Slot(fqn, tensors[fqn].dtype, Box.whole(tensors[fqn].shape), file, len(header) + offset)
        for fqn, offset in extents
    ]
    return header, slots, len(header) + position
