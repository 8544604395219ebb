"""numpy arrays as torch tensors and back, over the same memory. Apart from DCP, whose import takes a second."""

import numpy as np
import torch

from converters.dtypes import numpy_dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor over an array's memory; numpy knows bfloat16 and float8 only through ml_dtypes, torch not at all."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(array.shape)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values on the CPU, row-major, without a copy where they lie so already."""
    local = tensor.detach().cpu().contiguous()
    raw = local.reshape(-1).view(torch.uint8).numpy()
    return raw.view(numpy_dtype(dtype_name(local.dtype))).reshape(tuple(local.shape))
