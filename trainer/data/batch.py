"""A batch of training data: input tokens, target tokens, and the documents that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.sample import IGNORED, Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and targets, int64 [B, S]; targets are the tokens one position later, IGNORED where there is no target.

    `documents` int32 [B, S]: tokens of a sample with the same number attend to each other; numbers rise along the
    sample. None: all tokens of a sample do.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None

    @property
    def num_valid_tokens(self) -> int:
        return int((self.targets != IGNORED).sum())


def batch_of(samples: Sequence[Sample], *, pin_memory: bool) -> Batch:
    """Samples as a batch; pinned memory makes copies to a GPU asynchronous."""

    def stacked(rows: Sequence[np.ndarray | None], dtype: type[np.integer]) -> torch.Tensor:
        whole = torch.from_numpy(np.stack([row for row in rows if row is not None]).astype(dtype))
        return whole.pin_memory() if pin_memory else whole

    tokens, targets, documents = zip(*samples, strict=True)
    has_documents = documents[0] is not None
    return Batch(
        stacked(tokens, np.int64), stacked(targets, np.int64), stacked(documents, np.int32) if has_documents else None
    )
