"""How tokens go through a rank's parts of the model: in one piece here, or as a pipeline (`parallel/pipeline.py`)."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

LossSum = Callable[[Tensor, Tensor], Tensor]


class Runner(Protocol):
    """What the loop does with this rank's parts, settled at build: one piece, or stages of a pipeline."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor, num_valid_tokens: float
    ) -> Tensor: ...

    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor: ...


class WholeModel:
    """The runner where a rank holds all layers."""

    def __init__(self, model: nn.Module, loss_sum: LossSum):
        self.model, self.loss_sum = model, loss_sum

    def forward_backward(self, tokens: Tensor, targets: Tensor, positions: Tensor, num_valid_tokens: float) -> Tensor:
        loss = self.loss_sum(self.model(tokens, positions), targets) / num_valid_tokens
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        return self.loss_sum(self.model(tokens, positions), targets)
