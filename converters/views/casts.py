"""Cast element types, reporting overflows and rounding, and count values that are not finite."""

from dataclasses import dataclass

import numpy as np

from converters.common.dtypes import DTYPES, numpy_dtype
from converters.common.errors import UnsupportedError, list_offenders

# By dtype: (mask that clears the sign, smallest masked pattern that is an infinity or a NaN)
_NON_FINITE = {
    "float64": (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "float32": (0x7FFF_FFFF, 0x7F80_0000),
    "bfloat16": (0x7FFF, 0x7F80),
    "float16": (0x7FFF, 0x7C00),
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e5m2": (0x7F, 0x7C),
}


def check_castable(casts: dict[str, tuple[str, str]]) -> None:
    """Raise UnsupportedError for casts (FQN → (from, to)) that are not between floating types; all are listed."""
    wrong = [
        f"{fqn}: {old} to {new}"
        for fqn, (old, new) in casts.items()
        if old != new and not (DTYPES[old].is_floating and DTYPES[new].is_floating)
    ]
    if wrong:
        raise UnsupportedError(f"only casts between floating types are possible:{list_offenders(wrong)}")


@dataclass(frozen=True, slots=True)
class Cast:
    """Values in another type, rounded to nearest even, and the errors of the cast."""

    values: np.ndarray
    overflows: int  # values that are no longer finite
    relative_error: float  # the largest |new - old| / |old| of the finite ones; 1.0 if one became zero


def cast(array: np.ndarray, dtype: str) -> Cast:
    """The values in `dtype`. Every cast of a conversion is made here."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = array.astype(numpy_dtype(dtype))
    overflows = max(0, count_non_finite(values, dtype) - count_non_finite(array, array.dtype.name))
    exact = np.can_cast(array.dtype, values.dtype, "safe")  # also for the types of ml_dtypes
    return Cast(values, overflows, 0.0 if exact else _relative_error(array, values))


def _relative_error(old: np.ndarray, new: np.ndarray) -> float:
    wide = np.promote_types(np.result_type(old, np.float32), np.float32)
    old, new = np.atleast_1d(old).astype(wide), np.atleast_1d(new)  # numpy makes scalars of arrays without dims
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(new.astype(wide) - old)
        size = np.abs(old)
        np.divide(error, size, out=error, where=size > 0)
    return float(np.max(error, where=np.isfinite(error), initial=0.0))


def count_non_finite(array: np.ndarray, dtype: str) -> int:
    """Number of infinite and NaN elements; 0 for types that have neither."""
    if dtype not in _NON_FINITE or array.size == 0:
        return 0
    mask, first = _NON_FINITE[dtype]
    unsigned, signed = np.dtype(f"u{array.itemsize}"), np.dtype(f"i{array.itemsize}")
    bits = np.ascontiguousarray(array).reshape(-1).view(unsigned)
    # The usual case: two vectorized passes without a copy. Negative values are the largest unsigned numbers
    if bits.view(signed).max() < first and bits.max() < first + mask + 1:
        return 0
    return int(np.count_nonzero((bits & unsigned.type(mask)) >= first))
