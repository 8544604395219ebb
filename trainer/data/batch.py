"""A batch of training data: input tokens and target tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.config.sections import Dataloader

IGNORED = -100  # a target without loss


@dataclass(frozen=True, slots=True)
class Batch:
    """Both int64 [B, S]; targets are the tokens one position later, IGNORED where there is no target."""

    tokens: torch.Tensor
    targets: torch.Tensor

    @property
    def num_valid_tokens(self) -> int:
        return int((self.targets != IGNORED).sum())


def batch_of(windows: Sequence[np.ndarray], *, pin_memory: bool) -> Batch:
    """Windows of seq_len + 1 token ids as a batch; pinned memory makes copies to a GPU asynchronous."""
    ids = torch.from_numpy(np.stack(windows).astype(np.int64))
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return Batch(tokens.pin_memory(), targets.pin_memory()) if pin_memory else Batch(tokens, targets)


def pinning_machine_problems(training: Dataloader, validation: Dataloader, device: torch.device) -> list[str]:
    """Pinned memory is for copies to a GPU."""
    if device.type == "cuda":
        return []
    asked = {"training": training.pin_memory, "validation": validation.pin_memory}
    return [f"{name}.dataloader.pin_memory needs a GPU to copy batches to" for name, is_on in asked.items() if is_on]
