"""Device meshes by name, made from the degrees.

Three grids over the same ranks, in the same order, merge different neighbouring axes: parameters use `fsdp`
(dp_shard × cp), data uses `batch` (dp_replicate × dp_shard), the loss uses `loss` (batch × cp). Each is a real axis of
its grid, because torch deprecates slicing of flattened axes.
"""

from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from converters.layout import MeshShape


@dataclass(frozen=True, slots=True)
class Meshes:
    """One-dimensional meshes by name: pp, dp_replicate, fsdp, tp, batch, cp, loss. Axes of degree 1 are there too.

    `parameters` is the grid [pp, dp_replicate, fsdp, tp]: DTensors of one parameter live on slices of it.
    """

    dims: MeshShape
    device_type: str
    parameters: DeviceMesh
    data: DeviceMesh
    losses: DeviceMesh
    axes: dict[str, DeviceMesh] = field(default_factory=dict)  # of those that were asked for

    def __getitem__(self, name: str) -> DeviceMesh:
        """One object per name: torch would slice a new one each time, and recompile each pipeline stage for it."""
        if name in self.axes:
            return self.axes[name]
        for grid in (self.parameters, self.data, self.losses):
            if name in (grid.mesh_dim_names or ()):
                return self.axes.setdefault(name, grid[name])
        raise KeyError(name)

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP shards over: [fsdp], or [dp_replicate, fsdp] where shards are replicated (HSDP)."""
        return self.parameters["dp_replicate", "fsdp"] if self.dims.dp_replicate > 1 else self.parameters["fsdp"]


def make_meshes(dims: MeshShape, device_type: str) -> Meshes:
    """The meshes of this rank. The default process group must exist and have dims.world_size ranks."""

    def grid(**axes: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    return Meshes(
        dims=dims,
        device_type=device_type,
        parameters=grid(pp=dims.pp, dp_replicate=dims.dp_replicate, fsdp=dims.fsdp, tp=dims.tp),
        data=grid(pp=dims.pp, batch=dims.batch, cp=dims.cp, tp=dims.tp),
        losses=grid(pp=dims.pp, loss=dims.batch * dims.cp, tp=dims.tp),
    )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it where no mesh is involved."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
