"""FSDP of experts under expert parallelism: over another mesh than the rest of their layer."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from trainer.models.moe import MoE

SHARDS_WITH_LAYER = hasattr(_fsdp_common, "ShardPlacementResult")
"""Whether this torch gathers parameters on several meshes at once, when a layer begins (2.13).

Before it, experts are a nested FSDP module, whose hooks the compiler does not take inside of a layer.
"""


class ShardedExperts:
    """Shards experts over `mesh`, and along `dim`: 1 if more ranks share a stack than it has experts."""

    def __init__(self, mesh: DeviceMesh, *, dim: int):
        self._mesh, self._placement = mesh, Shard(dim)
        is_2d = mesh.ndim == 2
        if SHARDS_WITH_LAYER:
            self._info = (
                _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
                if is_2d
                else _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
            )

    def shard(self, modules: nn.Module | list[nn.Module], mesh: DeviceMesh, options: dict[str, Any]) -> None:
        """`fully_shard` over `mesh`, experts over their own."""
        roots = modules if isinstance(modules, list) else [modules]
        all_experts = [m.experts for module in roots for m in module.modules() if isinstance(m, MoE)]
        if not SHARDS_WITH_LAYER:
            for experts in (m for m in all_experts if not isinstance(m, FSDPModule)):  # the root is sharded last
                fully_shard(experts, mesh=self._mesh, shard_placement_fn=lambda _: self._placement, **options)
            fully_shard(modules, mesh=mesh, **options)
            return
        of_experts = {id(p) for experts in all_experts for p in experts.parameters()}

        def place(parameter: nn.Parameter) -> Any:
            if id(parameter) not in of_experts:
                return None
            return _fsdp_common.ShardPlacementResult(self._placement, self._info)

        fully_shard(modules, mesh=mesh, shard_placement_fn=place, **options)
