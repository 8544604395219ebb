"""Balance experts without a loss (arXiv 2408.15664): after each step, raise the bias of those with too few tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from converters.common.errors import UnsupportedError
from converters.families.parameters import Role
from converters.families.registry import get_family
from trainer.train_model import TrainModel


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The use of a layer's experts in a step, over all ranks."""

    layer: int
    max_over_mean: float  # tokens of the most used expert over the mean; 1: all alike
    num_dead: int  # experts without a token


class ExpertBalance:
    """Counts the tokens of each expert over a step, and then moves each `expert_bias` by the counts of all ranks.

    L layers with experts in the whole model, of which this rank holds some; E experts in each.
    """

    def __init__(self, model: TrainModel, *, device: torch.device | str):
        """Raises UnsupportedError if layers have different numbers of experts."""
        listed = [p for p in get_family(model.family).parameters(model.args) if p.role is Role.ROUTER_BIAS]
        sizes = {p.shape[0] for p in listed}
        if len(sizes) > 1:
            raise UnsupportedError(f"layers with different numbers of experts are not supported: {sorted(sizes)}")
        self._layers = [p.layer for p in listed if p.layer is not None]
        modules = {fqn: module for part in model.parts for fqn, module in part.named_modules()}
        self._held: dict[int, Any] = {row: modules[p.module] for row, p in enumerate(listed) if p.module in modules}
        self.counts_LE = torch.zeros(len(listed), *sizes, dtype=torch.int64, device=device)
        for row, module in self._held.items():
            module.load_E = self.counts_LE[row]
        rates = [[self._held[row].balance_rate if row in self._held else 0.0] for row in range(len(listed))]
        self.rates_L1 = torch.tensor(rates, dtype=torch.float64, device=device)

    @staticmethod
    def of(model: TrainModel, *, device: torch.device | str) -> "ExpertBalance | None":
        """None if the model has no experts."""
        has_experts = get_family(model.family).has_role(Role.ROUTER_BIAS, model.args)
        return ExpertBalance(model, device=device) if has_experts else None

    def take(self) -> Tensor:
        """This rank's counts since the last call, float64 [L, E]. Rows of other pipeline stages are zero."""
        counts_LE = self.counts_LE.double()
        self.counts_LE.zero_()
        return counts_LE

    @torch.no_grad()
    def update(self, counts_LE: Tensor, found_inf: Tensor) -> None:
        """Move each bias by `balance_rate`, up if an expert has fewer tokens than the mean; on average by nothing.

        `counts_LE`: the sum over all ranks; a factor that all experts share has no effect. `found_inf`: 1 in a step
        without an update.
        """
        signs_LE = (counts_LE.mean(dim=1, keepdim=True) - counts_LE).sign()
        moves_LE = (signs_LE - signs_LE.mean(dim=1, keepdim=True)) * (1 - found_inf)
        moves_LE = (self.rates_L1 * moves_LE.to(self.rates_L1)).float()
        if self._held:
            biases = [module.expert_bias for module in self._held.values()]
            torch._foreach_add_(biases, [moves_LE[row] for row in self._held])

    def loads(self, counts_LE: Tensor) -> Tensor:
        """Float64 [2L]: the largest count over the mean of each layer, then the number of experts without a token."""
        return torch.cat([counts_LE.amax(dim=1) / counts_LE.mean(dim=1), (counts_LE == 0).sum(dim=1)])

    def read(self, loads: Sequence[float]) -> tuple[ExpertLoad, ...]:
        """The numbers of `loads` on the host."""
        largest, dead = loads[: len(self._layers)], loads[len(self._layers) :]
        return tuple(
            ExpertLoad(layer, most, int(num_dead))
            for layer, most, num_dead in zip(self._layers, largest, dead, strict=True)
        )
