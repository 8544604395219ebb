"""Adam and AdamW over all parts of a model, and their state by FQN."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.config.sections import Optimizer as OptimizerSection
from trainer.optim.adam import AdamOfOtherMoments, LocalAdam


def build_optimizer(named_parameters: Mapping[str, nn.Parameter], settings: OptimizerSection) -> torch.optim.Optimizer:
    """One optimizer over parameters by FQN, with its state already allocated, so that a checkpoint can fill it."""
    dtypes = {parameter.dtype for parameter in named_parameters.values()}
    state_dtype = getattr(torch, settings.state_dtype) if settings.state_dtype else None
    adam = LocalAdam if state_dtype is None or dtypes == {state_dtype} else AdamOfOtherMoments
    optimizer = adam(
        [{"params": list(named_parameters.items())}],
        decoupled=settings.name == "AdamW",
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=settings.implementation == "fused",
        foreach=settings.implementation == "foreach",
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the peak, which the schedule scales; torch's name
    for parameter in named_parameters.values():
        optimizer.state[parameter] = {
            # fused kernels need it on the device, the others on the CPU
            "step": torch.zeros((), device=parameter.device if settings.implementation == "fused" else "cpu"),
            "exp_avg": torch.zeros_like(parameter, dtype=state_dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=state_dtype),
        }
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Moments and settings by FQN, flat: `state.<fqn>.exp_avg`, `param_groups.<fqn>.lr`.

    The keys of torch's `get_optimizer_state_dict(flatten_optimizer_state_dict=True)`, made from our FQNs: the same for
    every layout, with pipeline stages and tied weights. The tensors are live, to be filled in place.
    """
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for fqn, parameter in zip(group["param_names"], group["params"], strict=True):
            flat |= {f"state.{fqn}.{name}": value for name, value in optimizer.state[parameter].items()}
            flat |= {f"param_groups.{fqn}.{name}": value for name, value in settings.items()}
    return flat
