"""Boxes of tensors: rectangular parts, and what can be read box by box."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np

from converters.common.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: `offsets[d] <= index < offsets[d] + sizes[d]`.

    A 0-dim tensor has the box ((), ()).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Box":
        return Box((0,) * len(shape), tuple(shape))

    def intersect(self, other: "Box") -> "Box | None":
        """The common part, or None if it is empty."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, size = max(a, b), min(a + n, b + m) - max(a, b)
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def slices_within(self, outer: "Box") -> tuple[slice, ...]:
        """Index of this box in an array that holds `outer`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, outer.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Element type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """Anything whose tensors can be read box by box: files on disk, a renamed and permuted view, computed values.

    The engine copies from a source, the trainer and inference load from one.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, fqn: str, box: Box) -> np.ndarray[Any, Any]:
        """The values of a box, row-major, in the tensor's own dtype. Memory is the box plus a bounded buffer."""
        ...


@runtime_checkable
class DerivedSource(TensorSource, Protocol):
    """A source over another one."""

    @property
    def source(self) -> TensorSource:
        """The other one."""
        ...

    @property
    def identity(self) -> str:
        """Text that identifies what is added to it, to resume only the same work."""
        ...


def count_dtypes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes by element type, the largest first."""
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += prod(info.shape) * itemsize(info.dtype)
    return dict(sizes.most_common())


def row_blocks(box: Box, element_bytes: int, max_bytes: int) -> Iterator[Box]:
    """`box` cut along dim 0 into parts of at most `max_bytes` each (one row if a row is larger)."""
    if not box.sizes or box.num_elements * element_bytes <= max_bytes:
        yield box
        return
    rows = max(1, max_bytes // (prod(box.sizes[1:]) * element_bytes))
    for start in range(0, box.sizes[0], rows):
        size = min(rows, box.sizes[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (size, *box.sizes[1:]))
