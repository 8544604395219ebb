"""One table of element types: our name, size, numpy dtype, safetensors code, torch storage class."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from converters.common.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `name` is torch's spelling without the `torch.` prefix."""

    name: str
    itemsize: int
    safetensors: str
    torch_storage: str  # typed storage class, or "" if torch has none and writes an UntypedStorage + dtype
    is_floating: bool


DTYPES = {
    d.name: d
    for d in (
        DType("float64", 8, "F64", "DoubleStorage", True),
        DType("float32", 4, "F32", "FloatStorage", True),
        DType("bfloat16", 2, "BF16", "BFloat16Storage", True),
        DType("float16", 2, "F16", "HalfStorage", True),
        DType("float8_e4m3fn", 1, "F8_E4M3", "", True),
        DType("float8_e5m2", 1, "F8_E5M2", "", True),
        DType("int64", 8, "I64", "LongStorage", False),
        DType("int32", 4, "I32", "IntStorage", False),
        DType("int16", 2, "I16", "ShortStorage", False),
        DType("int8", 1, "I8", "CharStorage", False),
        DType("uint8", 1, "U8", "ByteStorage", False),
        DType("uint16", 2, "U16", "", False),
        DType("uint32", 4, "U32", "", False),
        DType("uint64", 8, "U64", "", False),
        DType("bool", 1, "BOOL", "BoolStorage", False),
        DType("complex64", 8, "C64", "ComplexFloatStorage", False),
        DType("complex128", 16, "", "ComplexDoubleStorage", False),
    )
}
BY_SAFETENSORS = {d.safetensors: d.name for d in DTYPES.values() if d.safetensors}
BY_TORCH_STORAGE = {d.torch_storage: d.name for d in DTYPES.values() if d.torch_storage}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return DTYPES[dtype].itemsize


@cache
def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of `dtype` (bfloat16, float8: of ml_dtypes). Raises CheckpointError for an unknown name."""
    if dtype not in DTYPES:
        raise CheckpointError(f"unknown element type {dtype!r}", hint=f"known: {', '.join(DTYPES)}")
    if dtype == "bfloat16" or dtype.startswith("float8"):
        import ml_dtypes  # imported late: listing a checkpoint does not need it

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
        return found
    return np.dtype(dtype)
