"""The runner of a rank's parts, forward and backward: the whole model here; parallel/ has pipelines and replicas."""

from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.batch import Inputs


class Runner(Protocol):
    """Runs this rank's parts: the whole model, or stages of a pipeline. Chosen at build."""

    def forward_backward(self, inputs: Inputs, num_units: Tensor | float) -> Tensor: ...

    def forward_loss(self, inputs: Inputs) -> Tensor: ...


class WholeModel:
    """The runner if a rank holds all units."""

    def __init__(self, model: nn.Module):
        self.model = model

    def forward_backward(self, inputs: Inputs, num_units: Tensor | float) -> Tensor:
        loss: Tensor = self.model(inputs.x, **inputs.by_name) / num_units
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def forward_loss(self, inputs: Inputs) -> Tensor:
        loss: Tensor = self.model(inputs.x, **inputs.by_name)
        return loss
