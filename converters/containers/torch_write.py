"""Plan a torch file: a flat dict of tensors in one zip, as torch.save writes it. torch is not imported."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from zlib import crc32

from converters.catalog import Box, TensorInfo
from converters.containers.stored_zip import ZipEntry, small_entry, zip_pieces
from converters.containers.target import Segment, Slot, Target, joined
from converters.containers.tensor_pickle import dump_tensors
from converters.containers.write_at import write_at
from converters.dtypes import itemsize
from converters.manifest import FileSum


def plan_torch(
    tensors: Mapping[str, TensorInfo], *, file: str, shared: Mapping[str, str] | None = None, root: str = "archive"
) -> Target:
    """A Target with the tensors in their order in one file; data starts at multiples of 64, so it can be mapped.

    `shared`: name → the tensor whose data it is too. That is written once, as torch.save does for tied weights, and
    torch.load gives two tensors over one storage. `root`: the folder inside the zip, which torch.save names after the
    file it was first saved to.
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
        segments = [Segment(offset, len(data), crc32(data)) for offset, data in written]
        segments += [Segment(s.byte_offset, n, crc) for s, n, crc in zip(slots, sizes, crcs, strict=True)]
        return {file: joined(segments)}

    *before_data, (last_offset, last) = pieces([0] * len(owners))
    slots = [
        Slot(fqn, tensors[fqn].dtype, Box.whole(tensors[fqn].shape), file, offset + len(data))
        for fqn, (offset, data) in zip(owners, before_data, strict=True)
    ]
    return Target(dict(tensors), slots, {file: last_offset + len(last)}, finish)
