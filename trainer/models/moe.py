"""A mixture-of-experts feed-forward in plain PyTorch: `combine(compute(experts, dispatch(x, route(x)))) + shared(x)`.

The weights of a token's experts multiply their outputs, or what they read (Llama 4). No token is dropped and no row is
padded. `LocalDispatch` sorts rows by expert; trainer/parallel/expert_parallel.py replaces it if experts are on other
ranks. All sums run in a fixed order, forward and backward, so that reruns are bit-equal.

Shape letters: T tokens, D model dim, E experts, K experts per token, F expert width, R = T * K rows in expert order.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from converters.families.blocks import Dense, Experts
from trainer.models.biased_experts import BiasedExperts
from trainer.models.feed_forward import FeedForward
from trainer.models.grouped_product import grouped_product

SIGMOID = "sigmoid"  # Experts.score


class Routes(NamedTuple):
    """The experts that the router chose for each token, best first, and their weights in the sum."""

    ids_TK: Tensor  # int64
    weights_TK: Tensor  # float32


class Gate(nn.Linear):
    """The router's linear layer: float32, from input and weight as the training dtype has them."""

    def forward(self, x_TD: Tensor) -> Tensor:
        bias_E = None if self.bias is None else self.bias.float()
        return F.linear(x_TD.float(), self.weight.float(), bias_E)


class Router(nn.Module):
    """Chooses the experts with the largest score + bias, in float32, or float64. Weights are scores: the bias balances.

    Of experts in groups, a token chooses among those of the groups whose best experts have the largest sum of score +
    bias (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; of DeepSeek-V2, the best one).
    """

    def __init__(self, dim: int, experts: Experts):
        super().__init__()
        self.num_experts, self.top_k, self.normalize = experts.num, experts.top_k, experts.normalize
        self.score, self.scale = experts.score, experts.scale
        self.num_groups, self.top_groups = experts.num_groups, experts.top_groups
        self.best_of_group = experts.best_of_group
        self.chooses_by_logits = experts.chooses_by_logits
        self.forces_balance = False  # for measurements: experts in turn, whatever the scores
        self.gate = Gate(dim, experts.num, bias=experts.has_biases)

    def forward(self, x_TD: Tensor, bias_E: Tensor) -> Routes:
        logits_TE: Tensor = self.gate(x_TD)
        scores_TE = logits_TE.sigmoid() if self.score == SIGMOID else logits_TE.softmax(dim=-1)
        if self.forces_balance:
            slots_R = torch.arange(len(x_TD) * self.top_k, device=x_TD.device)
            ids_TK = (slots_R % self.num_experts).view(-1, self.top_k)
        else:
            # the float32 sigmoids of large logits all round to 1, those in float64 up to 36
            choice_TE = logits_TE.double().sigmoid() if self.chooses_by_logits else scores_TE
            choice_TE = choice_TE + bias_E
            if self.num_groups > 1:
                choice_TE = self._in_best_groups(choice_TE)
            ids_TK = choice_TE.topk(self.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.normalize:
            sums_T1 = weights_TK.sum(dim=-1, keepdim=True)
            # sigmoids may all be 0, as published; softmax's are not, and Qwen's are divided by their sum alone
            weights_TK = weights_TK / (sums_T1 + 1e-20 if self.score == SIGMOID else sums_T1)
        if self.scale != 1.0:
            weights_TK = weights_TK * self.scale
        return Routes(ids_TK, weights_TK)

    def _in_best_groups(self, choice_TE: Tensor) -> Tensor:
        """-inf for the experts of all other groups."""
        grouped = choice_TE.unflatten(-1, (self.num_groups, -1))  # type: ignore[no-untyped-call]
        of_groups = grouped.topk(self.best_of_group, dim=-1).values.sum(dim=-1)
        is_other = torch.ones_like(of_groups, dtype=torch.bool)
        is_other = is_other.scatter(1, of_groups.topk(self.top_groups, dim=-1).indices, False)
        in_best: Tensor = grouped.masked_fill(is_other.unsqueeze(-1), float("-inf")).flatten(1)
        return in_best


class Dispatched(NamedTuple):
    """Rows in expert order: those of expert e end at `ends_E[e]`."""

    x_RD: Tensor
    ends_E: Tensor  # int32
    order_R: Tensor  # int64: the position in [T, K] of each row
    back_R: Tensor  # int64: the row of each position


class LocalDispatch(nn.Module):
    """Every expert is on this rank: rows are sorted by expert, in token order within an expert."""

    def gather(self, x_TD: Tensor) -> Tensor:
        """The tokens whose rows are dispatched here, and which shared experts read: those of this rank."""
        return x_TD

    def forward(self, x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> Dispatched:
        sorted_R, order_R = ids_TK.flatten().sort(stable=True)
        back_R = torch.empty_like(order_R).scatter(0, order_R, torch.arange(len(order_R), device=order_R.device))
        experts_E = torch.arange(num_experts, device=ids_TK.device)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
        x_RD = _ToExperts.apply(x_TD, order_R, back_R, ids_TK.shape[1])  # type: ignore[no-untyped-call]
        return Dispatched(x_RD, ends_E, order_R, back_R)

    def scale(self, dispatched: Dispatched, weights_TK: Tensor) -> Dispatched:
        """Each row times its weight, in float32."""
        weights_R1 = weights_TK.flatten().unsqueeze(1)
        weights_R1 = _ToTokens.apply(weights_R1, dispatched.back_R, dispatched.order_R)  # type: ignore[no-untyped-call]
        return dispatched._replace(x_RD=(dispatched.x_RD * weights_R1).type_as(dispatched.x_RD))

    def compute(self, experts: nn.Module, dispatched: Dispatched) -> Tensor:
        """The experts' output of each row, in the order of the rows."""
        out_RD: Tensor = experts(dispatched.x_RD, dispatched.ends_E)
        return out_RD

    def combine(self, out_RD: Tensor, dispatched: Dispatched, weights_TK: Tensor) -> Tensor:
        """The weighted sum over each token's experts, best first, in float32."""
        out_TKD = _by_token(out_RD, dispatched, weights_TK.shape[1])
        return (out_TKD.float() * weights_TK.unsqueeze(-1)).sum(dim=1).type_as(out_RD)

    def add_up(self, out_RD: Tensor, dispatched: Dispatched, top_k: int) -> Tensor:
        """The sum over each token's experts, whose rows have been scaled, best first; torch adds in float32."""
        return _by_token(out_RD, dispatched, top_k).sum(dim=1)

    def finish(self, out_TD: Tensor) -> Tensor:
        """The output of this rank's tokens, from what is computed here of the gathered ones."""
        return out_TD


def _by_token(out_RD: Tensor, dispatched: Dispatched, top_k: int) -> Tensor:
    """[T, K, D]"""
    flat: Tensor = _ToTokens.apply(out_RD, dispatched.order_R, dispatched.back_R)  # type: ignore[no-untyped-call]
    return flat.view(-1, top_k, flat.shape[1])


class _ToExperts(Function):
    """Row i is token `order_R[i] // K`. The backward pass of indexing would add up in any order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, back_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(back_R)
        ctx.top_k = top_k
        return x_TD.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (back_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, back_R).view(-1, ctx.top_k, grad_RD.shape[1]).sum(dim=1), None, None, None


class _ToTokens(Function):
    """Rows in the order of [T, K]."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_RD.index_select(0, back_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, order_R), None, None


class GroupedExperts(nn.Module):
    """SwiGLU experts, stacked: each multiplies its own rows."""

    def __init__(self, dim: int, experts: Experts):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts.num, experts.hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts.num, dim, experts.hidden))
        self.w3 = nn.Parameter(torch.empty(experts.num, experts.hidden, dim))

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        return grouped_swiglu(x_RD, self.w1, self.w2, self.w3, ends_E)


def grouped_swiglu(x_RD: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """SwiGLU of each expert's rows."""
    hidden_RF = F.silu(grouped_product(x_RD, w1_EFD, ends_E)) * grouped_product(x_RD, w3_EFD, ends_E)
    return grouped_product(hidden_RF, w2_EDF, ends_E)


class MoE(nn.Module):
    """Routed experts in place of a feed-forward, and the shared ones if the model has any."""

    expert_bias: Tensor

    def __init__(self, dim: int, experts: Experts):
        super().__init__()
        self.balance_rate = experts.balance_rate
        self.router = Router(dim, experts)
        self.dispatch = LocalDispatch()
        self.scales_input = experts.scales_input
        self.experts = BiasedExperts(dim, experts) if experts.fused_rows else GroupedExperts(dim, experts)
        # One, which every token uses: as wide as the experts that it is made of together
        self.shared_experts = FeedForward(dim, Dense(experts.shared_hidden)) if experts.shared_hidden else None
        self.register_buffer("expert_bias", torch.zeros(experts.num, dtype=torch.float32))
        self.load_E: Tensor | None = None  # rows of each expert, int64: backward adds those of its forward

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        ids_TK, weights_TK = self.router(x_TD, self.expert_bias)
        x_TD = self.dispatch.gather(x_TD)
        dispatched = self.dispatch(x_TD, ids_TK, len(self.expert_bias))
        shared_x_BLD = None if self.shared_experts is None else x_TD.view(-1, *x_BLD.shape[1:])
        del x_TD  # tokens of several ranks are not kept for the routed experts
        if self.load_E is not None:
            weights_TK = _counted(weights_TK, dispatched.ends_E, self.load_E)
        if self.scales_input:
            dispatched = self.dispatch.scale(dispatched, weights_TK)
        out_RD = self.dispatch.compute(self.experts, dispatched)
        if self.scales_input:
            out_TD = self.dispatch.add_up(out_RD, dispatched, weights_TK.shape[1])
        else:
            out_TD = self.dispatch.combine(out_RD, dispatched, weights_TK)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(shared_x_BLD).view_as(out_TD)
        return self.dispatch.finish(out_TD).view_as(x_BLD)


@torch.library.custom_op("titan::counted", mutates_args=())
def _counted(weights_TK: Tensor, ends_E: Tensor, load_E: Tensor) -> Tensor:
    """A copy of the weights, whose backward adds the rows of each expert to `load_E`.

    Backward runs once for every batch that is trained on: not in validation, and not again if activation
    checkpointing recomputes the layer.
    """
    return weights_TK.clone()


@_counted.register_fake
def _(weights_TK: Tensor, ends_E: Tensor, load_E: Tensor) -> Tensor:
    return torch.empty_like(weights_TK)


@torch.library.custom_op("titan::add_counts", mutates_args=())
def _add_counts(grad_TK: Tensor, ends_E: Tensor, load_E: Tensor) -> Tensor:
    """A copy of the gradient; adds the rows of each expert to `load_E`, which nothing in a graph reads.

    The write is not declared, and goes to `data`: autograd and the compiler take it for a change of a saved tensor, and
    refuse the backward passes of a pipeline's other microbatches.
    """
    load_E.data.add_(ends_E.diff(prepend=ends_E.new_zeros(1)))
    return grad_TK.clone()


@_add_counts.register_fake
def _(grad_TK: Tensor, ends_E: Tensor, load_E: Tensor) -> Tensor:
    return torch.empty_like(grad_TK)


def _keep_ends(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _count(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, None, None]:
    return _add_counts(grad_TK, *ctx.saved_tensors), None, None


_counted.register_autograd(_count, setup_context=_keep_ends)
