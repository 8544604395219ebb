"""Plan the shards of an original Meta release: `consolidated.NN.pth`, torch files cut for model parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from converters.catalog import Box, TensorInfo
from converters.containers.target import Slot, Target
from converters.containers.torch_write import plan_torch
from converters.manifest import FileSum
from converters.names import META_SHARD


def plan_meta(
    tensors: Mapping[str, TensorInfo],
    *,
    num_shards: int,
    dims: Mapping[str, int | None],
    shared: Mapping[str, str],
) -> Target:
    """A Target of `num_shards` files. `dims`: the dim that is cut into equal parts; None: whole in every file.

    `shared` is plan_torch's, and is so within each file. The zip's folder has the file's name, as torch.save gives it:
    a reader can tell shards that changed places.
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
