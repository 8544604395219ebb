"""Device meshes by name, and their communicators, made from the degrees.

Two grids over the same ranks, in the same order, merge different neighbouring axes: parameters use `fsdp`
(dp_shard × cp), data uses `batch` (dp_replicate × dp_shard). Each is a real axis of its grid, because torch deprecates
slicing of flattened axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from converters.layout import AXES, MeshShape

_FACTORS = {  # the degrees that an axis is the product of
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "fsdp": ("dp_shard", "cp"),
    "tp": ("tp",),
    "cp": ("cp",),
    "batch": ("dp_replicate", "dp_shard"),
}
ALL_RANKS = "all ranks"


def communicators(dims: MeshShape) -> dict[str, tuple[str, ...]]:
    """Communicators of a rank by name, and the axes that use each; none where there is one rank.

    Each takes memory, and on many nodes time to connect, so axes over the same ranks share one, and an axis of degree 1
    has none. Clipping and the verdict of a step run over all ranks. Only `cp` never shares: its all-gathers would wait
    for FSDP's, which are prefetched, where dp_shard is 1.
    """
    if dims.world_size == 1:
        return {}
    ranks = {tuple(degree for degree in AXES if getattr(dims, degree) > 1): ALL_RANKS}
    users: dict[str, tuple[str, ...]] = {ALL_RANKS: ()}
    for axis, factors in _FACTORS.items():
        if varying := tuple(degree for degree in factors if getattr(dims, degree) > 1):
            name = axis if axis == "cp" else ranks.setdefault(varying, axis)
            users[name] = (*users.get(name, ()), axis)
    return users


@dataclass(frozen=True, slots=True)
class Meshes:
    """One-dimensional meshes by name: pp, dp_replicate, fsdp, tp, batch, cp. Axes of degree 1 are there too.

    `parameters` is the grid [pp, dp_replicate, fsdp, tp]: DTensors of one parameter live on slices of it.
    """

    dims: MeshShape
    device_type: str
    parameters: DeviceMesh
    data: DeviceMesh
    groups: Mapping[str, dist.ProcessGroup]  # of `communicators`, by name
    axes: dict[str, DeviceMesh] = field(default_factory=dict)  # of those that were asked for

    def __getitem__(self, name: str) -> DeviceMesh:
        """One object per name: torch would slice a new one each time, and recompile each pipeline stage for it."""
        if name in self.axes:
            return self.axes[name]
        for grid in (self.parameters, self.data):
            if name in (grid.mesh_dim_names or ()):
                return self.axes.setdefault(name, grid[name])
        raise KeyError(name)

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP shards over: [fsdp], or [dp_replicate, fsdp] where shards are replicated (HSDP)."""
        return self.parameters["dp_replicate", "fsdp"] if self.dims.dp_replicate > 1 else self.parameters["fsdp"]


def make_meshes(dims: MeshShape, device_type: str) -> Meshes:
    """The meshes of this rank. The default process group must exist and have dims.world_size ranks."""
    groups = {name: _make_group(name, dims) for name in communicators(dims)}
    of_axis = {axis: groups[name] for name, axes in communicators(dims).items() for axis in axes}
    alone = _group_of_one()

    def grid(**axes: int) -> DeviceMesh:
        ranks, found = (
            torch.arange(dims.world_size).view(tuple(axes.values())),
            [of_axis.get(axis, alone) for axis in axes],
        )
        return DeviceMesh.from_group(found, device_type, ranks, mesh_dim_names=tuple(axes))

    return Meshes(
        dims=dims,
        device_type=device_type,
        parameters=grid(pp=dims.pp, dp_replicate=dims.dp_replicate, fsdp=dims.fsdp, tp=dims.tp),
        data=grid(pp=dims.pp, batch=dims.batch, cp=dims.cp, tp=dims.tp),
        groups=groups,
    )


def _make_group(name: str, dims: MeshShape) -> dist.ProcessGroup:
    """This rank's group of a communicator. All ranks create all groups of it."""
    default = dist.group.WORLD
    assert default is not None
    if name == ALL_RANKS:
        return default
    degrees = [getattr(dims, degree) for degree in AXES]
    inside = [AXES.index(degree) for degree in _FACTORS[name]]
    outside = [number for number in range(len(AXES)) if number not in inside]
    grid = torch.arange(dims.world_size).view(degrees).permute(*outside, *inside)
    ranks = grid.reshape(-1, prod(degrees[number] for number in inside)).tolist()
    # As torch's init_device_mesh: NCCL that is bound to its device splits its communicator once for all groups
    if default.bound_device_id is not None:
        group = dist.split_group(split_ranks=ranks, group_desc=f"mesh_{name}")
    else:
        group, _ = dist.new_subgroups_by_enumeration(ranks, group_desc=f"mesh_{name}")  # type: ignore[no-untyped-call]
    assert group is not None
    return group


def _group_of_one() -> dist.ProcessGroup:
    """The group of axes of degree 1, without a communicator: it does nothing, and only FSDP asks for its size.

    FSDP over one rank copies instead of communicating; a sum over one rank is its input.
    """
    # Created by this rank only: otherwise all others would take part in a split of NCCL's communicator.
    group: dist.ProcessGroup | None = dist.new_group(
        [dist.get_rank()], backend="fake", use_local_synchronization=True, group_desc="mesh_of_one"
    )
    assert group is not None
    return group


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it where no mesh is involved."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
