"""A mixture-of-experts feed-forward in plain PyTorch: `combine(experts(dispatch(x, route(x))))`.

No token is dropped and no row is padded. `LocalDispatch` sorts rows by expert; a dispatch that sends them to other ranks
replaces it from outside. All sums run in a fixed order, so that reruns are bit-equal.

Shape letters: T tokens, D model dim, E experts, K experts per token, F expert width, R = T * K rows in expert order.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.families.base import Experts
from trainer.models.grouped_product import grouped_product


class Routes(NamedTuple):
    """The experts that the router chose for each token, best first, and their weights in the sum."""

    ids_TK: Tensor  # int64
    weights_TK: Tensor  # float32


class Router(nn.Module):
    """Chooses the experts with the largest score + bias. Weights are the scores alone: the bias only balances."""

    def __init__(self, dim: int, experts: Experts):
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(dim, experts.num, bias=False)

    def forward(self, x_TD: Tensor, bias_E: Tensor) -> Routes:
        logits_TE = F.linear(x_TD.float(), self.gate.weight.float())
        scores_TE = logits_TE.softmax(dim=-1)
        ids_TK = (scores_TE + bias_E).topk(self.experts.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.experts.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return Routes(ids_TK, weights_TK)


class Dispatched(NamedTuple):
    """Rows in expert order: those of expert e end at `ends_E[e]`. `order_R`: for each, its position in [T, K]."""

    x_RD: Tensor
    ends_E: Tensor  # int32
    order_R: Tensor  # int64


class LocalDispatch(nn.Module):
    """Every expert is on this rank: rows are sorted by expert, in token order within an expert."""

    def forward(self, x_TD: Tensor, routes: Routes, num_experts: int) -> Dispatched:
        ids_R = routes.ids_TK.flatten()
        order_R = ids_R.argsort(stable=True)
        # scatter_add of integers has the same result in any order
        counts_E = ids_R.new_zeros(num_experts).scatter_add(0, ids_R, torch.ones_like(ids_R))
        return Dispatched(
            x_TD[order_R // routes.ids_TK.shape[1]], counts_E.cumsum(0, dtype=torch.int32), order_R
        )

    def combine(self, out_RD: Tensor, dispatched: Dispatched, routes: Routes) -> Tensor:
        """The weighted sum over each token's experts, best first, in float32."""
        T, K = routes.ids_TK.shape
        back_R = torch.empty_like(dispatched.order_R)
        back_R[dispatched.order_R] = torch.arange(len(back_R), device=back_R.device)
        out_TKD = out_RD[back_R].view(T, K, -1)
        return (out_TKD.float() * routes.weights_TK.unsqueeze(-1)).sum(dim=1).type_as(out_RD)


class GroupedExperts(nn.Module):
    """SwiGLU experts, stacked: each multiplies its own rows."""

    def __init__(self, dim: int, experts: Experts):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts.num, experts.hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts.num, dim, experts.hidden))
        self.w3 = nn.Parameter(torch.empty(experts.num, experts.hidden, dim))

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        hidden_RF = F.silu(grouped_product(x_RD, self.w1, ends_E)) * grouped_product(x_RD, self.w3, ends_E)
        return grouped_product(hidden_RF, self.w2, ends_E)


class MoE(nn.Module):
    """Routed experts in place of a feed-forward."""

    expert_bias: Tensor

    def __init__(self, dim: int, experts: Experts):
        super().__init__()
        self.router = Router(dim, experts)
        self.dispatch: LocalDispatch = LocalDispatch()
        self.experts = GroupedExperts(dim, experts)
        self.register_buffer("expert_bias", torch.zeros(experts.num, dtype=torch.float32))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        routes = self.router(x_TD, self.expert_bias)
        dispatched = self.dispatch(x_TD, routes, len(self.expert_bias))
        out_RD = self.experts(dispatched.x_RD, dispatched.ends_E)
        return self.dispatch.combine(out_RD, dispatched, routes).view_as(x_BLD)
