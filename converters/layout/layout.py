"""The box of each tensor that a rank of a mesh holds: pipeline stages, then TP and EP, then FSDP inside. Torch-free.

Tests compare this with real DTensor placements (FSDP over TP on one dim is torch's `_StridedShard`) and with the
stage split of torchtitan: a job of that mesh reads a checkpoint cut here chunk by chunk, no byte twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any

from converters.common.box import Box, TensorInfo, row_blocks
from converters.common.collector import collector_paused
from converters.common.dtypes import itemsize
from converters.common.errors import ConfigError
from converters.common.sizes import GIB, MIB
from converters.containers.dcp_names import RANK_FILE
from converters.families.parameters import MTP_LAYERS, Parameter, units_of
from converters.layout.mesh_shape import MeshShape
from converters.layout.stages import ranks_of_stages, split_stages

# A stock reader loads whole chunks, so a chunk bounds its memory; each costs an item header (~1.5 KB).
MAX_CHUNK_BYTES = 256 * MIB
SEED_CHUNK_BYTES = 64 * MIB  # if the readers' mesh is unknown: a rank reads little that it does not need
MAX_CHUNKS = 4_000_000  # of a model's weights; 405B on 512 ranks has 470,000
_MANY_CHUNKS, _FEW_ELEMENTS = 500_000, 16_384  # chunks that small cost more to list than to store
_READER_BYTES_PER_CHUNK = 1900  # in stock DCP's list

Files = dict[str, list[tuple[str, Box]]]  # file name → the boxes in it, in order


def cuts_within_experts(num_experts: int, mesh: MeshShape) -> bool:
    """Whether FSDP cuts dim 1 of a stack, as in torchtitan, not dim 0: more ranks share it than there are experts."""
    return mesh.ep > 1 and mesh.efsdp * mesh.ep > num_experts


def chunk_bounds(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """(start, length) of a chunk as torch.chunk cuts: ceil(size / num_chunks) rows, the last ones fewer or none."""
    step = ceil(size / num_chunks)
    start = min(index * step, size)
    return start, min(step, size - start)


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts a dim into `degree` parts; ranks of neighbouring parts are `stride` apart. `dim` None: all have it whole."""

    dim: int | None
    degree: int
    stride: int


def cuts_of(parameter: Parameter, mesh: MeshShape) -> list[Cut]:
    """The cuts of a parameter among a replica's ranks, in their order: EP and TP first, FSDP inside."""
    if parameter.expert_dim is None or mesh.ep == 1:
        return [Cut(parameter.tp_dim, mesh.tp, 1), Cut(0, mesh.fsdp, mesh.tp)]
    num_experts = parameter.shape[parameter.expert_dim]
    return [
        Cut(parameter.expert_dim, mesh.ep, mesh.etp),
        Cut(parameter.tp_dim, mesh.etp, 1),
        Cut(1 if cuts_within_experts(num_experts, mesh) else 0, mesh.efsdp, mesh.etp * mesh.ep),
    ]


def local_box(parameter: Parameter, mesh: MeshShape, rank: int) -> Box | None:
    """The part of a parameter that `rank` holds within its stage, or None if uneven sharding leaves it without any.

    A 0-dim tensor, and a buffer that is saved but not trained, is whole on every rank. If TP does not divide dim 0,
    these are FSDP2's shards, although torch 2.13's `_StridedShard` computes others.
    """
    if not parameter.is_trained:
        return Box.whole(parameter.shape)
    cuts = cuts_of(parameter, mesh)
    return _box_at(parameter.shape, cuts, [rank // cut.stride % cut.degree for cut in cuts])


def _box_at(shape: tuple[int, ...], cuts: Sequence[Cut], numbers: Sequence[int]) -> Box | None:
    """The part of these numbers, one for each cut."""
    offsets, sizes = [0] * len(shape), list(shape)
    for cut, number in zip(cuts, numbers, strict=True):
        if cut.dim is not None and sizes:
            start, sizes[cut.dim] = chunk_bounds(sizes[cut.dim], cut.degree, number)
            offsets[cut.dim] += start
    return Box(tuple(offsets), tuple(sizes)) if prod(sizes) or 0 in shape else None


@collector_paused()
def boxes_for_mesh(
    parameters: Sequence[Parameter],
    mesh: MeshShape,
    *,
    itemsizes: Mapping[str, int],
    stages: Sequence[Sequence[str]] | None = None,
    stage_ranks: Sequence[int] | None = None,
) -> Files:
    """The files of a checkpoint as ranks of `mesh` would write it; of several ranks that hold a box, the lowest does.

    `itemsizes`: bytes per element by FQN. `stages`: names of units per stage; split_stages's result when None.
    `stage_ranks`: the pipeline rank of each; round robin when None. A tied embedding has one FQN and so belongs to
    the first stage. Raises ConfigError if the mesh would cut the model into more chunks than a `.metadata` can
    reasonably list.
    """
    if stages is None:
        stages = split_stages(mesh.pp, units_of(parameters))
    if stage_ranks is None:
        stage_ranks = ranks_of_stages(len(stages), mesh.pp)
    pp_rank_of = {unit: rank for rank, units in zip(stage_ranks, stages, strict=True) for unit in units}
    ranks_per_stage = mesh.world_size // mesh.pp
    _reject_tiny_chunks(parameters, mesh)
    # Layers are alike: boxes of one shape are made once and shared. 405B on 512 ranks has 470,000, of which 3,000
    # differ.
    boxes_by_kind: dict[tuple[Any, ...], list[tuple[int, Box]]] = {}
    files: dict[int, list[tuple[str, Box]]] = {}
    for parameter in parameters:
        element_bytes = itemsizes[parameter.fqn]
        kind = (parameter.shape, *cuts_of(parameter, mesh), element_bytes, parameter.is_trained)
        if kind not in boxes_by_kind:
            boxes_by_kind[kind] = list(_boxes_within_stage(parameter, mesh, element_bytes))
        is_mtp = parameter.unit.startswith(MTP_LAYERS)  # which predict from what the last stage computes
        first_rank = (stage_ranks[-1] if is_mtp else pp_rank_of[parameter.unit]) * ranks_per_stage
        for rank, box in boxes_by_kind[kind]:
            files.setdefault(first_rank + rank, []).append((parameter.fqn, box))
    return {RANK_FILE.format(rank=rank): files[rank] for rank in sorted(files)}


def _boxes_within_stage(parameter: Parameter, mesh: MeshShape, element_bytes: int) -> Iterator[tuple[int, Box]]:
    """(rank within its stage, box) for every part of a tensor, each once: the lowest rank that holds it writes it."""
    if not parameter.is_trained:
        yield 0, Box.whole(parameter.shape)
        return
    cuts = sorted(cuts_of(parameter, mesh), key=lambda cut: -cut.stride)  # by rank, of the first dp_replicate
    order = cuts_of(parameter, mesh)
    for numbers in product(*(range(_num_parts(cut, parameter.shape)) for cut in cuts)):
        number_of = dict(zip(cuts, numbers, strict=True))
        box = _box_at(parameter.shape, order, [number_of[cut] for cut in order])
        if box is not None:
            rank = sum(number * cut.stride for cut, number in number_of.items())
            yield from ((rank, part) for part in row_blocks(box, element_bytes, MAX_CHUNK_BYTES))


def _num_parts(cut: Cut, shape: tuple[int, ...]) -> int:
    """Number of parts that may hold something: ranks beyond the rows hold nothing."""
    if cut.dim is None or not shape:
        return 1
    return min(cut.degree, max(shape[cut.dim], 1))


def _reject_tiny_chunks(parameters: Sequence[Parameter], mesh: MeshShape) -> None:
    """Raise ConfigError for too many small chunks: each costs every reading rank about 2 kB of memory and 15 µs."""
    num_chunks = sum(prod(_num_parts(cut, p.shape) for cut in cuts_of(p, mesh)) for p in parameters)
    elements = sum(prod(p.shape) for p in parameters) // max(1, num_chunks)
    if num_chunks > MAX_CHUNKS or (num_chunks > _MANY_CHUNKS and elements < _FEW_ELEMENTS):
        list_gib = num_chunks * _READER_BYTES_PER_CHUNK / GIB
        raise ConfigError(
            f"the mesh {mesh} would cut this model into {num_chunks:,} chunks of {elements:,} values on average: "
            f"a stock reader would hold {list_gib:.1f} GiB of their list on every rank",
            hint="use a smaller dp_shard together with dp_replicate (HSDP)",
        )


def boxes_for_any_mesh(tensors: Mapping[str, TensorInfo], *, file_bytes: int) -> Files:
    """Row blocks of at most 64 MiB in files of about `file_bytes`, for readers of unknown layout."""
    files: Files = {}
    current: list[tuple[str, Box]] = []
    filled = 0
    for fqn, info in tensors.items():
        size = itemsize(info.dtype)
        for box in row_blocks(Box.whole(info.shape), size, SEED_CHUNK_BYTES):
            if not current or filled + box.num_elements * size > file_bytes:
                current = files.setdefault(RANK_FILE.format(rank=len(files)), [])
                filled = 0
            current.append((fqn, box))
            filled += box.num_elements * size
    return files


def boxes_for_num_files(tensors: Mapping[str, TensorInfo], num_files: int) -> Files:
    """Row blocks of at most 64 MiB in exactly `num_files` files of about the same size.

    Raises ConfigError if rows, which stay whole, are too few or too long for so many files.
    """
    total = sum(prod(info.shape) * itemsize(info.dtype) for info in tensors.values())
    files: list[list[tuple[str, Box]]] = [[] for _ in range(num_files)]
    number = filled = 0
    for fqn, info in tensors.items():
        size, row, num_rows = itemsize(info.dtype), 0, info.shape[0] if info.shape else 1
        row_bytes = prod(info.shape[1:]) * size
        if not row_bytes * num_rows:
            files[number].append((fqn, Box.whole(info.shape)))
            continue
        while row < num_rows:
            until = total * (number + 1) // num_files  # where this file ends, in bytes of all tensors
            fitting = max(0, round((until - filled) / row_bytes)) if number < num_files - 1 else num_rows
            rows = min(num_rows - row, fitting)
            if rows:
                part = Box((row, *(0,) * len(info.shape[1:])), (rows, *info.shape[1:])) if info.shape else Box((), ())
                files[number] += [(fqn, block) for block in row_blocks(part, size, SEED_CHUNK_BYTES)]
                row, filled = row + rows, filled + rows * row_bytes
            if rows == fitting and number < num_files - 1:
                number += 1
    if not all(files):
        raise ConfigError(
            f"{total:,} bytes cannot be divided into {num_files:,} files",
            hint=f"a row is not split between files, so {num_files - sum(map(bool, files)):,} would be empty",
        )
    return {RANK_FILE.format(rank=rank): boxes for rank, boxes in enumerate(files)}
