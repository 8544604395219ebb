"""Plan torch files as torch.save writes them, without torch: one dict of tensors, or the shards of a Meta release."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

from converters.common.box import Box, TensorInfo
from converters.common.crc import join_crc32
from converters.common.dtypes import itemsize
from converters.common.errors import UnsupportedError, list_offenders
from converters.common.names import META_SHARD
from converters.containers.stored_zip import ZipEntry, small_entry, zip_pieces
from converters.containers.target import Crc32Of, Slot, Target
from converters.containers.tensor_pickle import dump_tensors
from converters.families.foreign import StoredTensor
from converters.naming.meta_names import stored_shape


def plan_torch(
    tensors: Mapping[str, TensorInfo],
    *,
    file: str,
    shared: Mapping[str, str] | None = None,
    root: str = "archive",
    stored: Sequence[StoredTensor] = (),
    streamed: bool = False,
) -> Target:
    """A Target with the tensors in their order in one file; data is aligned to 64 bytes, for memory mapping.

    `shared`: name → the tensor that it shares its data with (tied weights). The data is written once, as torch.save
    does, and torch.load returns two tensors over one storage. `root`: the folder inside the
    zip, which torch.save names after the file it was first saved to. `stored`: tensors of the file that are several
    ones, one after another, or have another name or shape. `streamed`: see Target.
    """
    shared = shared or {}
    owners = [fqn for fqn in tensors if fqn not in shared]
    records = _records({fqn: tensors[fqn] for fqn in owners}, stored)
    owners = [fqn for record in records for fqn in record.parts]
    keys = {record.name: str(number) for number, record in enumerate(records)}
    keys |= {fqn: keys[owner] for fqn, owner in shared.items()}
    pickled = dump_tensors(
        {record.name: record.info for record in records} | {fqn: tensors[fqn] for fqn in shared}, keys
    )
    sizes = [_num_bytes(tensors[fqn]) for fqn in owners]

    firsts = list(accumulate((len(record.parts) for record in records), initial=0))
    before = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
    entries = [small_entry(f"{root}/{name}", data) for name, data in before]
    for record in records:
        size = sum(_num_bytes(tensors[part]) for part in record.parts)
        entries.append(ZipEntry(f"{root}/data/{keys[record.name]}", size))

    def around(file: str, crc32_of: Crc32Of) -> Iterator[tuple[int, bytes]]:
        def record_crc32(number: int) -> int:
            crc = 0
            for part in range(firsts[number], firsts[number + 1]):
                crc = join_crc32(crc, crc32_of(part), sizes[part])
            return crc

        return zip_pieces(entries, record_crc32, streamed=streamed)

    *before_data, (last_offset, last) = around(file, lambda number: 0)
    slots = []
    for record, (offset, data) in zip(records, before_data, strict=True):
        start = offset + len(data)
        for fqn in record.parts:
            slots.append(Slot(fqn, tensors[fqn].dtype, Box.whole(tensors[fqn].shape), file, start))
            start += _num_bytes(tensors[fqn])
    return Target(dict(tensors), slots, {file: last_offset + len(last)}, around, streamed=streamed)


@dataclass(frozen=True, slots=True)
class _Record:
    """A tensor of the file, and the tensors that it is made of."""

    name: str
    info: TensorInfo
    parts: tuple[str, ...]


def _records(tensors: Mapping[str, TensorInfo], stored: Sequence[StoredTensor]) -> list[_Record]:
    """In the order of each one's first part. Raises UnsupportedError if parts are missing or differ in type."""
    of_part = {part: each for each in stored for part in each.parts}
    records, problems = dict[str, _Record](), []
    for name, info in tensors.items():
        each = of_part.get(name)
        if each is None:
            records[name] = _Record(name, info, (name,))
        elif each.name not in records:
            present = {part: tensors[part] for part in each.parts if part in tensors}
            if len(present) < len(each.parts) or len({part.dtype for part in present.values()}) > 1:
                problems.append(f"{each.name}: {', '.join(f'{n} ({i.dtype})' for n, i in present.items())}")
                continue
            shape = stored_shape(each, {part: entry.shape for part, entry in present.items()})
            records[each.name] = _Record(each.name, TensorInfo(info.dtype, shape), tuple(each.parts))
    if problems:
        raise UnsupportedError(
            "Meta's files have one tensor for several, of which some are missing or have another type:"
            + list_offenders(list(dict.fromkeys(problems))),
            tries=["--dtype bfloat16"],
        )
    return list(records.values())


def _num_bytes(info: TensorInfo) -> int:
    return prod(info.shape) * itemsize(info.dtype)


def plan_meta(
    tensors: Mapping[str, TensorInfo],
    *,
    num_shards: int,
    dims: Mapping[str, int | None],
    shared: Mapping[str, str],
    stored: Sequence[StoredTensor] = (),
    streamed: bool = False,
) -> Target:
    """A Target of `num_shards` files. `dims`: the dim that is cut into equal parts; None: whole in every file.

    `shared`, `stored` and `streamed` apply within each file, as in plan_torch. The zip's folder has the name of the
    file, as with torch.save: a reader can detect renamed shards.
    """
    parts: dict[str, Target] = {}
    slots: list[Slot] = []
    for index in range(num_shards):
        boxes = {name: _part(info.shape, dims[name], num_shards, index) for name, info in tensors.items()}
        infos = {name: TensorInfo(info.dtype, boxes[name].sizes) for name, info in tensors.items()}
        file = META_SHARD.format(index=index)
        part = plan_torch(infos, file=file, shared=shared, root=Path(file).stem, stored=stored, streamed=streamed)
        parts[file] = part
        slots += [slot._replace(box=boxes[slot.fqn]) for slot in part.slots]

    def around(file: str, crc32_of: Crc32Of) -> Iterator[tuple[int, bytes]]:
        return parts[file].around(file, crc32_of)

    file_bytes = {file: part.file_bytes[file] for file, part in parts.items()}
    return Target(dict(tensors), slots, file_bytes, around, streamed=streamed)


def _part(shape: tuple[int, ...], dim: int | None, num_shards: int, index: int) -> Box:
    if dim is None:
        return Box.whole(shape)
    size, rest = divmod(shape[dim], num_shards)
    assert not rest, f"{shape[dim]} cannot be cut into {num_shards} equal parts"
    offsets = tuple(index * size if d == dim else 0 for d in range(len(shape)))
    return Box(offsets, tuple(size if d == dim else n for d, n in enumerate(shape)))
