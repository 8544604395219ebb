"""The interface of what makes two tensors of one while it is copied: codes, and scales of blocks of them."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from converters.catalog import Box


@dataclass(frozen=True, slots=True)
class Encoded:
    """A box of values as codes, the box `codes_place` of their tensor, and scales, the box `place` of theirs."""

    codes: np.ndarray[Any, Any]
    codes_place: Box
    scales: np.ndarray[Any, Any]
    place: Box
    num_moved: int  # scales that differ from known ones


class Encoder(Protocol):
    """Encodes one tensor. Its boxes are whole rows, begin at a block, and end at one or at the end of the tensor."""

    @property
    def scales(self) -> str:
        """The name of the tensor of scales."""
        ...

    @property
    def rows(self) -> int:
        """Of a block."""
        ...

    @property
    def digest_dtype(self) -> str:
        """The element type of the values that a reader gets, which digests are of."""
        ...

    def encode(self, box: Box, values: np.ndarray[Any, Any]) -> Encoded: ...

    def values_of(self, encoded: Encoded, box: Box) -> np.ndarray[Any, Any]:
        """What a reader gets."""
        ...
