"""Batches of samples, and the inputs of a model that are made of them, whatever is learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Batch(Protocol):
    """Samples of one data-parallel rank."""

    @property
    def num_units(self) -> int:
        """Number of units of progress in these samples, which the loss is divided by."""
        ...

    def split(self, size: int) -> Sequence["Batch"]:
        """Batches of `size` samples, in order."""
        ...

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device; the host need not wait for a copy to a GPU."""
        ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model part is called with: `part(x, **by_sample, **shared)`.

    Stages of a pipeline but the first get what the stage before returned instead of `x`.
    """

    x: Tensor  # [B, …]
    by_sample: Mapping[str, Tensor] = field(default_factory=dict)  # each [B, …]
    shared: Mapping[str, Tensor] = field(default_factory=dict)  # the same for all samples

    @property
    def by_name(self) -> dict[str, Any]:
        return {**self.by_sample, **self.shared}
