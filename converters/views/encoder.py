"""The interface of what makes two tensors of one while it is copied: codes, and scales of blocks of them."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from converters.common.box import Box
from converters.common.errors import CheckpointError
from converters.views.casts import count_non_finite


@dataclass(frozen=True, slots=True)
class Encoded:
    """A box of values as codes, the box `codes_place` of their tensor, and scales, the box `place` of theirs."""

    codes: np.ndarray[Any, Any]
    codes_place: Box
    scales: np.ndarray[Any, Any]
    place: Box
    num_moved: int  # scales that differ from known ones


LARGEST_VALUE = 2.5e38  # that is quantized: rounded up by a fifth, which no code exceeds, it is still a finite bfloat16


def require_in_range(weight: str, amax: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Raise CheckpointError if finite values, `amax` of their blocks, could be infinite when they are read back.

    Values that are infinite or NaN themselves are the caller's to count.
    """
    with np.errstate(invalid="ignore"):
        is_fine = bool((amax <= LARGEST_VALUE).all())
    if not is_fine and count_non_finite(values, values.dtype.name) == 0:
        raise CheckpointError(
            f"{weight}: holds values larger than {LARGEST_VALUE:g}, which could become infinite when they are quantized"
        )


class Encoder(Protocol):
    """Encodes one tensor. Its boxes are whole rows, begin at a block, and end at one or at the end of the tensor."""

    @property
    def scales(self) -> str:
        """The name of the tensor of scales."""
        ...

    @property
    def rows(self) -> int:
        """Number of rows of one block."""
        ...

    @property
    def digest_dtype(self) -> str:
        """The element type of the values that a reader gets, which digests are of."""
        ...

    def encode(self, box: Box, values: np.ndarray[Any, Any]) -> Encoded: ...

    def values_of(self, encoded: Encoded, box: Box) -> np.ndarray[Any, Any]:
        """The values that a reader gets."""
        ...
