"""How tokens go through a rank's parts of the model: in one piece here, or as a pipeline (`parallel/pipeline.py`).

A part is `part(tokens or hidden states, positions, targets)`; the last one returns the summed loss (`loss/install.py`).
"""

from typing import Protocol

import torch
from torch import Tensor, nn


class Runner(Protocol):
    """What the loop does with this rank's parts, settled at build: one piece, or stages of a pipeline."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor, num_valid_tokens: float
    ) -> Tensor: ...

    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor: ...


class WholeModel:
    """The runner where a rank holds all layers."""

    def __init__(self, model: nn.Module):
        self.model = model

    def forward_backward(self, tokens: Tensor, targets: Tensor, positions: Tensor, num_valid_tokens: float) -> Tensor:
        loss = self.model(tokens, positions, targets) / num_valid_tokens
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        return self.model(tokens, positions, targets)
