"""Plan torch files as torch.save writes them, without torch: one dict of tensors, or the shards of a Meta release."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from converters.catalog import Box, TensorInfo
from converters.containers.stored_zip import ZipEntry, small_entry, zip_pieces
from converters.containers.target import ChecksummedRange, Slot, Target, joined, write_at
from converters.containers.tensor_pickle import dump_tensors
from converters.crc import crc32
from converters.dtypes import itemsize
from converters.manifest import FileSum
from converters.names import META_SHARD


def plan_torch(
    tensors: Mapping[str, TensorInfo], *, file: str, shared: Mapping[str, str] | None = None, root: str = "archive"
) -> Target:
    """A Target with the tensors in their order in one file; data is aligned to 64 bytes, for memory mapping.

    `shared`: name → the tensor that it shares its data with (tied weights). The data is written once, as torch.save
    does, and torch.load returns two tensors over one storage. `root`: the folder inside the
    zip, which torch.save names after the file it was first saved to.
    """
    shared = shared or {}
    owners = [fqn for fqn in tensors if fqn not in shared]
    keys = {fqn: str(number) for number, fqn in enumerate(owners)}
    keys |= {fqn: keys[owner] for fqn, owner in shared.items()}
    pickled = dump_tensors(tensors, keys)
    sizes = [prod(tensors[fqn].shape) * itemsize(tensors[fqn].dtype) for fqn in owners]

    def pieces(crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        before = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
        entries = [small_entry(f"{root}/{name}", data) for name, data in before]
        for fqn, size, crc in zip(owners, sizes, crcs, strict=True):
            entries.append(ZipEntry(f"{root}/data/{keys[fqn]}", size, crc))
        return zip_pieces(entries)

    def finish(folder: Path, crcs: Sequence[int]) -> dict[str, FileSum]:
        written = pieces(crcs)
        write_at(folder / file, written)
        segments = [ChecksummedRange(offset, len(data), crc32(data)) for offset, data in written]
        segments += [ChecksummedRange(s.byte_offset, n, crc) for s, n, crc in zip(slots, sizes, crcs, strict=True)]
        return {file: joined(segments)}

    *before_data, (last_offset, last) = pieces([0] * len(owners))
    slots = [
        Slot(fqn, tensors[fqn].dtype, Box.whole(tensors[fqn].shape), file, offset + len(data))
        for fqn, (offset, data) in zip(owners, before_data, strict=True)
    ]
    return Target(dict(tensors), slots, {file: last_offset + len(last)}, finish)


def plan_meta(
    tensors: Mapping[str, TensorInfo],
    *,
    num_shards: int,
    dims: Mapping[str, int | None],
    shared: Mapping[str, str],
) -> Target:
    """A Target of `num_shards` files. `dims`: the dim that is cut into equal parts; None: whole in every file.

    `shared` applies within each file, as in plan_torch. The zip's folder has the file's name, as with torch.save: a
    reader can detect renamed shards.
    """
    parts: list[Target] = []
    slots: list[Slot] = []
    for index in range(num_shards):
        boxes = {name: _part(info.shape, dims[name], num_shards, index) for name, info in tensors.items()}
        held = {name: TensorInfo(info.dtype, boxes[name].sizes) for name, info in tensors.items()}
        file = META_SHARD.format(index=index)
        part = plan_torch(held, file=file, shared=shared, root=Path(file).stem)
        parts.append(part)
        slots += [replace(slot, box=boxes[slot.fqn]) for slot in part.slots]

    def finish(folder: Path, crcs: Sequence[int]) -> dict[str, FileSum]:
        files: dict[str, FileSum] = {}
        start = 0
        for part in parts:
            files |= part.finish(folder, crcs[start : start + len(part.slots)])
            start += len(part.slots)
        return files

    return Target(dict(tensors), slots, {f: n for part in parts for f, n in part.file_bytes.items()}, finish)


def _part(shape: tuple[int, ...], dim: int | None, num_shards: int, index: int) -> Box:
    if dim is None:
        return Box.whole(shape)
    size, rest = divmod(shape[dim], num_shards)
    assert not rest, f"{shape[dim]} cannot be cut into {num_shards} equal parts"
    offsets = tuple(index * size if d == dim else 0 for d in range(len(shape)))
    return Box(offsets, tuple(size if d == dim else n for d, n in enumerate(shape)))
