"""A batch of text: input tokens, target tokens, and the documents that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.data.sample import IGNORED, Sample


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens and targets, int64 [B, S]; targets are the tokens one position later, IGNORED where there is no target.

    `documents` int32 [B, S]: tokens of a sample with the same number attend to each other; numbers rise along the
    sample. None: all tokens of a sample do.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None

    @property
    def num_units(self) -> int:
        """Number of tokens that have a target."""
        return int((self.targets != IGNORED).sum())

    def split(self, size: int) -> list["TokenBatch"]:
        columns = [torch.split(ids, size) for ids in self._tensors()]
        return [TokenBatch(*ids) for ids in zip(*columns, strict=True)]

    def to(self, device: torch.device | str) -> "TokenBatch":
        return TokenBatch(*(on_device(ids, torch.device(device)) for ids in self._tensors()))

    def _tensors(self) -> list[Tensor]:
        return [ids for ids in (self.tokens, self.targets, self.documents) if ids is not None]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A copy from memory that is not pinned would wait for the GPU's earlier work."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def batch_of(samples: Sequence[Sample], *, pin_memory: bool) -> TokenBatch:
    """Samples as a batch; pinned memory makes copies to a GPU asynchronous."""

    def stacked(rows: Sequence[np.ndarray | None], dtype: type[np.integer]) -> Tensor:
        whole = torch.from_numpy(np.stack([row for row in rows if row is not None]).astype(dtype))
        return whole.pin_memory() if pin_memory else whole

    tokens, targets, documents = zip(*samples, strict=True)
    has_documents = documents[0] is not None
    return TokenBatch(
        stacked(tokens, np.int64), stacked(targets, np.int64), stacked(documents, np.int32) if has_documents else None
    )
