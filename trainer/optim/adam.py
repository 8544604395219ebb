"""Adam and AdamW on this rank's part of each tensor, also with moments of another dtype than the parameters.

The numbers are torch's, whose kernels run here without DTensor's dispatch, which takes the host longer than the launch.

Moments of another dtype are not supported by torch's optimizers: torch's kernel runs in fp32 on copies of a few
parameters at a time; the results are rounded to each tensor's dtype. (torch 2.15 does this in its fused kernel on CUDA;
torchao's needs torch.compile.)
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from converters.families.parameters import is_block, unit_of
from trainer.optim.clip import local_gradient
from trainer.ranks.mesh import local_part

# Elements that are copied to fp32 at once: 256 MiB for each of parameter, gradient and moments.
COPIED_ELEMENTS = 1 << 26


class LocalAdam(torch.optim.Adam):
    """`torch.optim.Adam` with another `step`; `decoupled` makes it AdamW."""

    def __init__(self, params: ParamsT, *, decoupled: bool, **settings: Any):
        super().__init__(params, **settings, decoupled_weight_decay=decoupled)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            _run_kernel(self, group, parameters, _local_tensors(self, parameters))


class AdamOfOtherMoments(LocalAdam):
    """The same with moments of another dtype."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            for parameters in _batches((fqn, p) for fqn, p in named if p.grad is not None):
                self._update(group, parameters)  # its copies are freed before the next

    def _update(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        own = _local_tensors(self, parameters)
        wide = [[t.float() for t in tensors] for tensors in own]  # the tensor itself if it is already fp32
        _run_kernel(self, group, parameters, wide)
        for kind in (0, 2, 3):  # not the gradients
            for tensor, value in zip(own[kind], wide[kind], strict=True):
                if tensor is not value:
                    tensor.copy_(value)


def _local_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """This rank's parts of parameters, gradients and both moments."""
    states = [optimizer.state[p] for p in parameters]
    return [
        [local_part(p) for p in parameters],
        [local_gradient(p) for p in parameters],
        [local_part(state["exp_avg"]) for state in states],
        [local_part(state["exp_avg_sq"]) for state in states],
    ]


def _run_kernel(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    tensors: Sequence[list[Tensor]],
) -> None:
    values, gradients, averages, squares = tensors
    adam(
        values,
        gradients,
        averages,
        squares,
        [],
        [optimizer.state[p]["step"] for p in parameters],
        foreach=group["foreach"],
        fused=group["fused"],
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=getattr(optimizer, "found_inf", None),
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _batches(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one block, or outside of blocks, with at most COPIED_ELEMENTS, or a single larger one.

    Batches end with their block, so that an update needs the same memory for each layer, which lets
    `titan estimate-memory` extrapolate from a few layers.
    """
    for _, run in groupby(named, key=lambda one: is_block(unit := unit_of(one[0])) and unit):
        batch: list[nn.Parameter] = []
        num_elements = 0
        for _, parameter in run:
            size = local_part(parameter).numel()
            if batch and num_elements + size > COPIED_ELEMENTS:
                yield batch
                batch, num_elements = [], 0
            batch.append(parameter)
            num_elements += size
        yield batch
