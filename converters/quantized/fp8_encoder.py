"""Quantize matrices to float8 while they are copied (see views/encoder.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from converters.common.box import Box
from converters.common.dtypes import numpy_dtype
from converters.quantized.quantization import CODES, Fp8Scheme
from converters.views.encoder import Encoded, require_in_range
from converters.views.fp8 import block_amax, decode, encode, saturated, scales_of

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Fp8Encoder:
    """Quantizes one matrix (see views/encoder.py)."""

    scales: str  # name of the tensor of scales
    scheme: Fp8Scheme
    digest_dtype: str  # of the values that a reader gets
    scale_dtype: str = "float32"
    known: Callable[[Box], _Array] | None = None  # scales that another copy of the weights has
    keeps_known: bool = False  # use them, but where they are too small or too large for the values

    @property
    def rows(self) -> int:
        return self.scheme.block[0]

    def encode(self, box: Box, values: _Array) -> Encoded:
        """Codes and scales of `values`; not of values that are infinite or NaN, which the caller counts."""
        block = self.scheme.block
        with np.errstate(over="ignore", invalid="ignore"):
            amax = block_amax(values, block)
            require_in_range(self.scheme.weight_of(self.scales), amax, values)
            scales = scales_of(amax, power_of_two=self.scheme.power_of_two).astype(numpy_dtype(self.scale_dtype))
            first = (box.offsets[0] // block[0], box.offsets[1] // block[1])
            scales_box = Box(first, (scales.shape[0], scales.shape[1]))
            num_moved, is_exact = 0, self.scheme.power_of_two or self.scale_dtype != "float32"
            exact = np.full(scales.shape, is_exact)
            if self.known is not None:
                known = self.known(scales_box)
                wide = known.astype(np.float32)
                if self.keeps_known:
                    fits = (np.isfinite(wide) & (wide >= 0)) & ~saturated(amax, wide)
                    if self.scheme.power_of_two:
                        fits &= np.isin(np.frexp(wide)[0], (0, 0.5))
                    # A formula's scale, rounded up to a power of two for values that were not rounded yet, is no larger
                    large = fits & (wide > 2 * scales.astype(np.float32))
                    if large.any():
                        fits &= ~large | self._is_exact(box, values, amax, np.where(large, known, scales))
                    scales, exact = np.where(fits, known, scales), exact | fits
                num_moved = int(np.count_nonzero(scales.astype(np.float32) != wide))
            codes = encode(values, amax, scales.astype(np.float32), block, exact=exact)
            return Encoded(codes, box, scales, scales_box, num_moved)

    def _is_exact(self, box: Box, values: _Array, amax: _Array, scales: _Array) -> _Array:
        """A flag for each block: whether `scales` give it back bit for bit."""
        block = self.scheme.block
        codes = encode(values, amax, scales.astype(np.float32), block, exact=np.full(scales.shape, True))
        decoded = self.values_of(Encoded(codes, box, scales, box, 0), box)
        differs = decoded.view(np.uint16) != values.astype(decoded.dtype).view(np.uint16)
        rows, columns = (np.arange(0, size, step) for size, step in zip(values.shape, block, strict=True))
        is_exact: _Array = ~np.logical_or.reduceat(np.logical_or.reduceat(differs, rows, axis=0), columns, axis=1)
        return is_exact

    def values_of(self, encoded: Encoded, box: Box) -> _Array:
        start = (box.offsets[0], box.offsets[1])
        codes = encoded.codes.view(numpy_dtype(CODES))
        return decode(codes, encoded.scales, self.scheme.block, start=start, dtype=self.digest_dtype)
