"""Quantize tensors to mxfp4 while they are copied (see views/encoder.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from converters.common.box import Box
from converters.quantized.mxfp4_scheme import Mxfp4Scheme
from converters.views.encoder import Encoded, require_in_range
from converters.views.mxfp4 import (
    BLOCK,
    block_amax,
    decode,
    encode,
    scales_rounded_down,
    scales_rounded_up,
)

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Mxfp4Encoder:
    """Quantizes one tensor [..., columns]; `known` scales are compared, or kept if they keep every value."""

    scales: str  # name of the tensor of scales
    scheme: Mxfp4Scheme
    digest_dtype: str  # of the values that a reader gets
    scale_dtype: str = "uint8"
    known: Callable[[Box], _Array] | None = None  # scales that another copy of the weights has
    keeps_known: bool = False

    @property
    def rows(self) -> int:
        return 1

    def encode(self, box: Box, values: _Array) -> Encoded:
        """Codes and scales of `values`; not of values that are infinite or NaN, which the caller counts."""
        with np.errstate(over="ignore", invalid="ignore"):
            amax = block_amax(values)
            require_in_range(self.scheme.weight_of(self.scales), amax, values)
            scales = scales_rounded_up(amax) if self.scheme.rounds_up else scales_rounded_down(amax)
            (*lead, column), (*counts, columns) = box.offsets, box.sizes
            scales_box = Box((*lead, column // BLOCK), (*counts, columns // BLOCK))
            num_moved = 0
            if self.known is not None:
                known = self.known(scales_box)
                if self.keeps_known:
                    scales = np.where(self._is_exact(values, known, where=known != scales), known, scales)
                num_moved = int(np.count_nonzero(scales != known))
            codes = encode(values, scales)
            codes_place = Box((*scales_box.offsets, 0), codes.shape)
            return Encoded(codes, codes_place, scales, scales_box, num_moved)

    def _is_exact(self, values: _Array, scales: _Array, *, where: _Array) -> _Array:
        """A flag for each block: whether it is in `where`, and `scales` give it back bit for bit. Zeros are exact."""
        blocks, of_blocks = values.reshape(*scales.shape, BLOCK)[where], scales[where][:, None]
        decoded = decode(encode(blocks, of_blocks), of_blocks, self.digest_dtype)
        same = decoded.view(np.uint16) == blocks.astype(decoded.dtype).view(np.uint16)
        is_exact = np.zeros(scales.shape, bool)
        is_exact[where] = same.all(axis=-1)
        return is_exact

    def values_of(self, encoded: Encoded, box: Box) -> _Array:
        return decode(encoded.codes, encoded.scales, self.digest_dtype)
