"""The runner of a rank's parts, forward and backward: the whole model here; parallel/ has pipelines and replicas."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from converters.common.extensions import ExtensionError
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
        loss = as_loss_sum(self.model(inputs.x, **inputs.by_name)) / num_units
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def forward_loss(self, inputs: Inputs) -> Tensor:
        return as_loss_sum(self.model(inputs.x, **inputs.by_name))


def as_loss_sum(loss: Any) -> Tensor:
    """What the forward of a model returned. Raises ExtensionError if it is not one number in fp32."""
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.dtype in (torch.float32, torch.float64):
        return loss
    returned = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        returned = f"a tensor of {str(loss.dtype).removeprefix('torch.')} of shape {list(loss.shape)}"
    raise ExtensionError(
        f"the model's forward returned {returned}, not the summed loss, one number in fp32",
        hint="`install_loss` of its family's objective makes it return that",
    )
