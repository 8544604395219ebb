"""What a step is told that asks for the number in a tensor without values: what lets it go on as a good run does."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_LOOKING_FOR_TROUBLE = {aten.isnan.default, aten.isinf.default, aten.any.default, aten.any.dim, aten.any.dims}


def note_question(operation: Any, made: Any) -> None:
    """Remember of an operation's result that a good run finds nothing there."""
    if operation in _LOOKING_FOR_TROUBLE:
        made.finds_nothing = True


def number_in(tensor: Tensor) -> float | int | bool:
    """1, which can be divided by and counted with; False where a NaN was looked for, or any of something."""
    if getattr(tensor, "finds_nothing", False):
        return False
    return 1.0 if tensor.is_floating_point() else 1
