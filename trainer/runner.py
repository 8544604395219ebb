"""The runner of a rank's parts, forward and backward: the whole model here; parallel/ has pipelines and replicas."""

from typing import Protocol

import torch
from torch import Tensor, nn


class Runner(Protocol):
    """Runs this rank's parts: the whole model, or stages of a pipeline. Chosen at build."""

    def forward_backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor,
        num_valid_tokens: Tensor | float,
        **documents: Tensor,
    ) -> Tensor: ...

    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor, **documents: Tensor) -> Tensor: ...


class WholeModel:
    """The runner if a rank holds all layers."""

    def __init__(self, model: nn.Module):
        self.model = model

    def forward_backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor,
        num_valid_tokens: Tensor | float,
        **documents: Tensor,
    ) -> Tensor:
        loss: Tensor = self.model(tokens, positions, targets, **documents) / num_valid_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor, **documents: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, positions, targets, **documents)
        return loss
