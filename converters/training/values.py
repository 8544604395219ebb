"""Values of a training checkpoint that change their kind: numbers that become tensors, tensors that become numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from converters.catalog import Box, TensorInfo, TensorSource
from converters.containers.dcp_item import blob_item
from converters.dtypes import DTYPES


class WithNumbers:
    """A TensorSource with a few more 0-dim tensors, held in memory."""

    def __init__(self, source: TensorSource, numbers: Mapping[str, np.ndarray]):
        self.source = source
        self.tensors = dict(source.tensors) | {n: TensorInfo(v.dtype.name, v.shape) for n, v in numbers.items()}
        self._numbers = numbers

    def read(self, fqn: str, box: Box) -> np.ndarray[Any, Any]:
        return self._numbers[fqn] if fqn in self._numbers else self.source.read(fqn, box)


def is_number(info: TensorInfo) -> bool:
    """Whether a tensor is one real number."""
    return info.shape == () and (DTYPES[info.dtype].is_floating or "int" in info.dtype)


def number_item(source: TensorSource, name: str) -> bytes:
    """The finished item of a tensor's one number, as a plain int or float."""
    value = source.read(name, Box((), ()))
    return blob_item(float(value) if DTYPES[source.tensors[name].dtype].is_floating else int(value))
