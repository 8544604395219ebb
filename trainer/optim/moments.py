"""Adam and AdamW whose moments have another dtype than the parameters, which torch's optimizers do not support.

torch's kernel runs in fp32 on copies of a few parameters at a time; the results are rounded to each tensor's dtype.
(torch 2.15 does this in its fused kernel on CUDA; torchao's needs torch.compile.)
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from converters.layout import module_of
from trainer.mesh import local_part

# Elements that are copied to fp32 at once: 256 MiB for each of parameter, gradient and moments.
COPIED_ELEMENTS = 1 << 26


class AdamOfOtherMoments(torch.optim.Adam):
    """`torch.optim.Adam` with another `step`; `decoupled` makes it AdamW."""

    def __init__(self, params: ParamsT, *, decoupled: bool, **settings: Any):
        super().__init__(params, **settings, decoupled_weight_decay=decoupled)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameters in _batches(group["param_names"], group["params"]):
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        own = [
            list(map(local_part, tensors))
            for tensors in (
                parameters,
                [_gradient(p) for p in parameters],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
            )
        ]
        wide = [[t.float() for t in tensors] for tensors in own]  # the tensor itself where it is already fp32
        values, gradients, averages, squares = wide
        adam(
            values,
            gradients,
            averages,
            squares,
            [],
            [local_part(s["step"]) for s in states],
            foreach=group["foreach"],
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for kind in (0, 2, 3):  # not the gradients
            for tensor, value in zip(own[kind], wide[kind], strict=True):
                if tensor is not value:
                    tensor.copy_(value)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad


def _batches(fqns: Sequence[str], parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters of one layer, or outside of layers, with at most COPIED_ELEMENTS, or a single larger one.

    Batches end with their layer, so that an update needs the same memory for each layer, which lets
    `titan estimate-memory` extrapolate from a few layers.
    """
    named = zip(fqns, parameters, strict=True)
    for _, run in groupby(named, key=lambda one: one[0].startswith("layers.") and module_of(one[0])):
        batch: list[Tensor] = []
        num_elements = 0
        for _, parameter in run:
            size = local_part(parameter).numel()
            if batch and num_elements + size > COPIED_ELEMENTS:
                yield batch
                batch, num_elements = [], 0
            batch.append(parameter)
            num_elements += size
        yield batch
