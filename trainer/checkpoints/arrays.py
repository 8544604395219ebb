"""Views of numpy arrays as torch tensors and back. Separate from DCP, whose import is slow."""

import numpy as np
import torch

from converters.common.dtypes import numpy_dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `converters` uses for a torch dtype."""
    return str(dtype).removeprefix("torch.")


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor over an array's memory, also for ml_dtypes' bfloat16 and float8, which torch does not accept."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(array.shape)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values on the CPU, row-major; a view if they already are."""
    local = tensor.detach().cpu().contiguous()
    raw = local.reshape(-1).view(torch.uint8).numpy()
    return raw.view(numpy_dtype(dtype_name(local.dtype))).reshape(tuple(local.shape))
