"""Samples, and which documents their tokens belong to. Torch-free."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

IGNORED = -100  # a target without loss
Packing = Literal["concatenated", "best_fit"]


class Sample(NamedTuple):
    """One row of a batch; each [S]. `documents` numbers the documents of the sample from 0; None without masks."""

    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class DocumentRules:
    """The treatment of documents in samples; the words are those of training.document_mask and training.packing."""

    mask: Literal["none", "offsets", "eos"] = "none"
    packing: Packing = "concatenated"
    end_id: int | None = None  # the token that ends a document, for the mask `eos`

    @property
    def needs_offsets(self) -> bool:
        return self.mask == "offsets" or self.packing == "best_fit"


NO_DOCUMENTS = DocumentRules()


def window_sample(ids: np.ndarray, begins: np.ndarray | None, rules: DocumentRules) -> Sample:
    """The sample of S + 1 consecutive token ids. `begins`: the places in them where a document begins, if known."""
    tokens, targets = ids[:-1], ids[1:]
    if rules.mask == "none":
        return Sample(tokens, targets)
    begins_here = np.zeros(len(ids), np.int32)
    if rules.mask == "eos":
        begins_here[1:] = tokens == rules.end_id
    else:
        assert begins is not None
        begins_here[begins] = 1
        targets = np.where(begins_here[1:], IGNORED, targets.astype(np.int64))
    begins_here[0] = 0
    return Sample(tokens, targets, begins_here.cumsum(dtype=np.int32)[:-1])


def packed_sample(pieces: list[np.ndarray], seq_len: int) -> Sample:
    """The sample of documents' pieces, padded. The last id of a piece is only a target: nothing follows it."""
    tokens, targets = np.zeros(seq_len, np.int64), np.full(seq_len, IGNORED, np.int64)
    documents = np.full(seq_len, len(pieces), np.int32)  # the padding is one more
    end = 0
    for number, ids in enumerate(pieces):
        place = slice(end, end + len(ids) - 1)
        tokens[place], targets[place], documents[place] = ids[:-1], ids[1:], number
        end = place.stop
    return Sample(tokens, targets, documents)
