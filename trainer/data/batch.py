"""A batch of training data: what the model reads, and what it is to say."""

from dataclasses import dataclass

import torch

IGNORED = -100  # a target that the loss skips


@dataclass(frozen=True, slots=True)
class Batch:
    """Both int64 [B, S]; targets are the tokens one position later, IGNORED where there is nothing to learn."""

    tokens: torch.Tensor
    targets: torch.Tensor

    @property
    def num_valid_tokens(self) -> int:
        return int((self.targets != IGNORED).sum())
