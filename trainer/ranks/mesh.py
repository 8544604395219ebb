"""Device meshes by name, and their communicators, made from the degrees.

Grids over the same ranks, in the same order, merge different neighbouring axes: parameters use `fsdp` (dp_shard × cp),
data uses `batch` (dp_replicate × dp_shard), and experts under expert parallelism divide dp_shard × cp × tp into
`efsdp`, `ep` and `etp`. Each is a real axis of its grid, because torch deprecates slicing of flattened axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from converters.layout.mesh_shape import MeshShape

ALL_RANKS = "all ranks"
# The collectives of cp and ep would wait for FSDP's, which are prefetched, if both are over the same ranks; and FSDP
# tells the meshes of a layer's parameters apart by their groups.
_OWN = ("cp", "ep", "efsdp")


class _Axis(NamedTuple):
    """Groups of `degree` ranks that are `stride` apart."""

    degree: int
    stride: int


def _axes(dims: MeshShape) -> dict[str, _Axis]:
    """Every axis of the grids by name; those of experts only with expert parallelism."""
    within = dims.fsdp * dims.tp  # ranks of a replica of a stage
    axes = {
        "pp": _Axis(dims.pp, dims.dp_replicate * within),
        "dp_replicate": _Axis(dims.dp_replicate, within),
        "fsdp": _Axis(dims.fsdp, dims.tp),
        "tp": _Axis(dims.tp, 1),
        "cp": _Axis(dims.cp, dims.tp),
        "batch": _Axis(dims.batch, dims.cp * dims.tp),
    }
    if dims.ep > 1:
        axes |= {
            "efsdp": _Axis(dims.efsdp, dims.ep * dims.etp),
            "ep": _Axis(dims.ep, dims.etp),
            "etp": _Axis(dims.etp, 1),
        }
    return axes


def communicators(dims: MeshShape) -> dict[str, tuple[str, ...]]:
    """Communicators of a rank by name, and the axes that use each; none if there is one rank.

    Each takes memory, and on many nodes time to connect, so axes over the same ranks share one, and an axis of degree 1
    has none. Clipping and the verdict of a step run over all ranks. Only those of _OWN never share.
    """
    if dims.world_size == 1:
        return {}
    named = {_Axis(dims.world_size, 1): ALL_RANKS}
    users: dict[str, tuple[str, ...]] = {ALL_RANKS: ()}
    for name, axis in _axes(dims).items():
        if axis.degree > 1:
            communicator = name if name in _OWN else named.setdefault(axis, name)
            users[communicator] = (*users.get(communicator, ()), name)
    return users


@dataclass(frozen=True, slots=True)
class Meshes:
    """One-dimensional meshes by name: pp, dp_replicate, fsdp, tp, batch, cp; with expert parallelism efsdp, ep, etp.

    Axes of degree 1 are there too. `parameters` is the grid [pp, dp_replicate, fsdp, tp], `experts` the grid [pp,
    dp_replicate, efsdp, ep, etp]: DTensors of one parameter live on slices of one of them.
    """

    dims: MeshShape
    device_type: str
    parameters: DeviceMesh
    data: DeviceMesh
    groups: Mapping[str, dist.ProcessGroup]  # of `communicators`, by name
    experts: DeviceMesh | None = None  # with expert parallelism
    axes: dict[str, DeviceMesh] = field(default_factory=dict)  # of those that were asked for

    def __getitem__(self, name: str) -> DeviceMesh:
        """One object per name: torch would slice a new one each time, and recompile each pipeline stage for it."""
        if name in self.axes:
            return self.axes[name]
        for grid in (self.parameters, self.data, self.experts):
            if grid is not None and name in (grid.mesh_dim_names or ()):
                return self.axes.setdefault(name, grid[name])
        raise KeyError(name)

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh that FSDP shards over: [fsdp], or [dp_replicate, fsdp] if shards are replicated (HSDP)."""
        return self.parameters["dp_replicate", "fsdp"] if self.dims.dp_replicate > 1 else self.parameters["fsdp"]

    @property
    def efsdp(self) -> DeviceMesh | None:
        """Mesh that FSDP shards experts over, with expert parallelism; replicas as in `fsdp`."""
        if self.experts is None:
            return None
        return self.experts["dp_replicate", "efsdp"] if self.dims.dp_replicate > 1 else self.experts["efsdp"]


def make_meshes(dims: MeshShape, device_type: str) -> Meshes:
    """The meshes of this rank. The default process group must exist and have dims.world_size ranks."""
    groups = {name: _make_group(name, dims) for name in communicators(dims)}
    of_axis = {axis: groups[name] for name, axes in communicators(dims).items() for axis in axes}

    def grid(**axes: int) -> DeviceMesh:
        alone = _group_of_one()
        ranks, group = (
            torch.arange(dims.world_size).view(tuple(axes.values())),
            [of_axis.get(axis, alone) for axis in axes],
        )
        return DeviceMesh.from_group(group, device_type, ranks, mesh_dim_names=tuple(axes))

    return Meshes(
        dims=dims,
        device_type=device_type,
        parameters=grid(pp=dims.pp, dp_replicate=dims.dp_replicate, fsdp=dims.fsdp, tp=dims.tp),
        data=grid(pp=dims.pp, batch=dims.batch, cp=dims.cp, tp=dims.tp),
        groups=groups,
        experts=grid(pp=dims.pp, dp_replicate=dims.dp_replicate, efsdp=dims.efsdp, ep=dims.ep, etp=dims.etp)
        if dims.ep > 1
        else None,
    )


def _make_group(name: str, dims: MeshShape) -> dist.ProcessGroup:
    """This rank's group of a communicator. All ranks create all groups of it."""
    default = dist.group.WORLD
    assert default is not None
    if name == ALL_RANKS:
        return default
    axis = _axes(dims)[name]
    ranks = torch.arange(dims.world_size).view(-1, axis.degree, axis.stride).mT.reshape(-1, axis.degree).tolist()
    return own_group(ranks, description=f"mesh_{name}")


def own_group(groups: list[list[int]], *, description: str) -> dist.ProcessGroup:
    """The group of this rank, of several that are disjoint and have all ranks. All ranks create all of them.

    Of fake ranks only this one creates its own: so a communicator has the same name on every rank, and code that was
    compiled with the name on one rank can run on another.
    """
    default = dist.group.WORLD
    assert default is not None
    # As torch's init_device_mesh: NCCL that is bound to its device splits its communicator once for all groups
    if default.bound_device_id is not None:
        group = dist.split_group(split_ranks=groups, group_desc=description)
    elif dist.get_backend() == "fake":
        group = dist.new_group(
            next(list(ranks) for ranks in groups if dist.get_rank() in ranks), group_desc=description
        )
    else:
        group, _ = dist.new_subgroups_by_enumeration(groups, group_desc=description)  # type: ignore[no-untyped-call]
    assert group is not None
    return group


def _group_of_one() -> dist.ProcessGroup:
    """The group of axes of degree 1, without a communicator: it does nothing, and only FSDP asks for its size.

    FSDP over one rank copies instead of communicating; a sum over one rank is its input.
    """
    # Created by this rank only: otherwise all others would take part in a split of NCCL's communicator. Its name then
    # depends on the rank, but for fake ranks.
    group: dist.ProcessGroup | None = dist.new_group(
        [dist.get_rank()],
        backend="fake",
        use_local_synchronization=dist.get_backend() != "fake",
        group_desc="mesh_of_one",
    )
    assert group is not None
    return group


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it if no mesh is involved."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
