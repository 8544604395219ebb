"""Expert and tensor parallelism of experts: whole experts on the ranks of `ep`, slices of each on those of `etp`.

Tokens are sequence shards if there is tensor parallelism. Each rank routes its own, sends their rows to the ranks
that hold the experts, and adds up what comes back. Ranks that hold slices of the same experts first gather each other's
tokens, and share the sums of their slices at the end.
"""

from collections.abc import Mapping
from math import ceil
from types import MethodType

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from converters.layout.mesh_shape import MeshShape
from trainer.models.biased_experts import BiasedExperts
from trainer.models.moe import Dispatched, GroupedExperts, LocalDispatch, MoE, grouped_swiglu
from trainer.models.tensor_plan import TensorStyle
from trainer.models.units import ModelPart
from trainer.parallel.expert_exchange import NO_ROWS_ASSUMED, exchange_counts, return_from_experts, send_to_experts
from trainer.parallel.shards import gather_shards, scatter_sum
from trainer.ranks.mesh import Meshes, local_part

_OF_GATHERED = {TensorStyle.COLUMNS: TensorStyle.COLUMNS_OF_GATHERED, TensorStyle.ROWS: TensorStyle.PARTIAL_ROWS}
# The dim of features inside of an expert: [E, F, D], [E, D, F], [E, F, D]; of biased ones, [E, 2F, D], [E, 2F],
# [E, D, F]; and [E, D], which has none
_SLICED_DIM = {"w1": 1, "w2": 2, "w3": 1, "mlp1_weight": 1, "mlp1_bias": 1, "mlp2_weight": 2, "mlp2_bias": None}


class SlicedDispatch(LocalDispatch):
    """For ranks with slices of the same experts: they compute all of their tokens, and sum the outputs.

    Shared experts, sliced over the same ranks, read the gathered tokens, and their outputs are part of the sum.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self._group = group

    def gather(self, x_TD: Tensor) -> Tensor:
        return gather_shards(x_TD, self._group)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> Dispatched:
        return super().forward(x_TD, gather_shards(ids_TK, self._group), num_experts)

    def scale(self, dispatched: Dispatched, weights_TK: Tensor) -> Dispatched:
        return super().scale(dispatched, gather_shards(weights_TK, self._group))

    def combine(self, out_RD: Tensor, dispatched: Dispatched, weights_TK: Tensor) -> Tensor:
        return super().combine(out_RD, dispatched, gather_shards(weights_TK, self._group))

    def finish(self, out_TD: Tensor) -> Tensor:
        return scatter_sum(out_TD, self._group)


class Exchange:
    """Computes the rows of this rank on the ranks that hold their experts."""

    def __init__(self, group: dist.ProcessGroup, *, imbalance: float | None = None):
        """`imbalance`: for fake tensors, the rows that this rank receives over the mean of all ranks."""
        self.group_name: str = group.group_name
        self._num_ranks, self._imbalance = group.size(), imbalance

    def __call__(self, experts: nn.Module, dispatched: Dispatched) -> Tensor:
        num_rows = len(dispatched.x_RD)
        assumed = NO_ROWS_ASSUMED if self._imbalance is None else ceil(self._imbalance * num_rows)
        counts = exchange_counts(dispatched.ends_E, self.group_name, self._num_ranks)
        received_SD = send_to_experts(dispatched.x_RD, counts, self.group_name, assumed_rows=assumed)
        out_SD = experts(received_SD, counts.ends_L)
        return return_from_experts(out_SD, counts, self.group_name, num_rows=num_rows)


def with_shared_gather(plan: Mapping[str, TensorStyle], model: ModelPart, dims: MeshShape) -> Mapping[str, TensorStyle]:
    """The tensor-parallel plan of a model (or stage); shared experts use what `SlicedDispatch` gathers and sums."""
    if dims.expert_tp == 1:
        return plan
    prefixes = tuple(f"{name}.shared_experts." for name, module in model.named_modules() if isinstance(module, MoE))
    of_shared = {fqn: style for fqn, style in plan.items() if f"{fqn}.".startswith(prefixes)}
    kept = {fqn: style for fqn, style in plan.items() if fqn not in of_shared}
    return kept | {fqn: _OF_GATHERED[style] for fqn, style in of_shared.items() if style in _OF_GATHERED}


def apply_expert_parallel(model: ModelPart, meshes: Meshes, *, imbalance: float | None = None) -> None:
    """Distribute the experts of a model (or stage) over `ep` and `etp`, or over `tp` without expert parallelism."""
    dims = meshes.dims
    if dims.ep == 1 and dims.tp == 1:
        return
    slices = meshes["tp" if dims.ep == 1 else "etp"]
    for module in model.modules():
        if not isinstance(module, MoE):
            continue
        dispatch = SlicedDispatch(slices.get_group()) if dims.expert_tp > 1 else LocalDispatch()
        if dims.ep > 1:
            dispatch.compute = Exchange(meshes["ep"].get_group(), imbalance=imbalance)  # type: ignore[method-assign]
        module.dispatch = dispatch
        _distribute(module.experts, meshes)
        # Bound, not a partial: the compiler would take each layer's for other code
        if isinstance(module.experts, BiasedExperts):
            module.experts.adds_last_bias = slices.get_local_rank() == 0
            module.experts.forward = MethodType(_multiply_biased_here, module.experts)  # type: ignore[method-assign]
        else:
            module.experts.forward = MethodType(_multiply_here, module.experts)  # type: ignore[method-assign]


def _distribute(experts: nn.Module, meshes: Meshes) -> None:
    """Replace the weights by distributed ones; the module multiplies with the part that is here."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        dim = _SLICED_DIM[name]
        mesh, placements = _placed(meshes, Replicate() if dim is None else Shard(dim))
        placed = distribute_tensor(weight, mesh, placements, src_data_rank=None)
        setattr(experts, name, nn.Parameter(placed, requires_grad=weight.requires_grad))


def _placed(meshes: Meshes, sliced: Placement) -> tuple[DeviceMesh, list[Placement]]:
    if meshes.dims.ep == 1:
        return meshes["tp"], [sliced]
    if meshes.dims.etp == 1:
        return meshes["ep"], [Shard(0)]
    assert meshes.experts is not None
    return meshes.experts["ep", "etp"], [Shard(0), sliced]


def _multiply_here(experts: GroupedExperts, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    w1, w2, w3 = local_part(experts.w1), local_part(experts.w2), local_part(experts.w3)
    return grouped_swiglu(x_RD, w1, w2, w3, ends_E)


def _multiply_biased_here(experts: BiasedExperts, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    weights = local_part(experts.mlp1_weight), local_part(experts.mlp2_weight)
    biases = local_part(experts.mlp1_bias), local_part(experts.mlp2_bias)
    return experts.multiply(x_RD, ends_E, weights, biases)
