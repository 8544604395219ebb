"""Expressions: a tensor as a small tree over tensors of a source, such as a stack of experts or a half of a matrix.

Every node reads any box of its tensor and reads no more of the source than that box, up to a head of rows. A table of
names is typed for one direction (rules.py); rule_expressions.py makes the trees of both directions from it: Take and
Join, Stack and Index, HeadRows and HeadRows, Transpose and Transpose are each other's inverse.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from converters.common.box import Box, TensorSource
from converters.common.dtypes import numpy_dtype
from converters.views.fp8 import decode, num_blocks
from converters.views.mxfp4 import BLOCK as MXFP4_BLOCK
from converters.views.mxfp4 import CODE_BYTES
from converters.views.mxfp4 import decode as decode_mxfp4

Rows = Sequence[int]  # numbers of rows
RowNumbers = Callable[[str, Rows], Rows]  # (FQN, rows as stored) → native rows (see digest.py)


@dataclass(frozen=True, slots=True)
class Expression(ABC):
    """A node. It does not know its dtype and shape, which the view lists.

    A node says what is different from its operands: the nodes among its fields.
    """

    has_other_rows: ClassVar[bool] = False  # its rows, or their numbers, are not those of its operands
    has_source_rows: ClassVar[bool] = True  # each of its rows is one row of an operand, or of itself

    @property
    def operands(self) -> tuple["Expression", ...]:
        """The nodes that it is made of."""
        values = (getattr(self, name) for name in _field_names(type(self)))
        nodes = (node for value in values for node in (value if isinstance(value, tuple) else (value,)))
        return tuple(node for node in nodes if isinstance(node, Expression))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source's tensors that it reads."""
        return tuple(name for node in self.operands for name in node.sources)

    @property
    def rows_together(self) -> int:
        """Rows of a matrix that a block should hold together, because they are read together; 1: any block will do."""
        return max((node.rows_together for node in self.operands), default=1)

    @property
    def has_own_digest(self) -> bool:
        """Whether its digest is not that of the tensors that it is made of, nor of their sum (see source_rows)."""
        return self.has_other_rows or any(node.has_own_digest for node in self.operands)

    @abstractmethod
    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        """The values of a box."""

    def renamed(self, rename: Callable[[str], str]) -> "Expression":
        """The same over other tensors of the same shapes, such as an optimizer's moments."""
        return replace(self, **{field.name: _renamed(getattr(self, field.name), rename) for field in fields(self)})

    def source_rows(self, rows: Rows) -> Rows:
        """The numbers that rows have in the source's tensors. Each row must be one row of one of them, or of a Join.

        If the source is native, these are the numbers of a digest (see digest.py). A Join has its own: if its parts
        had theirs, which are the same ones, a digest would not change if rows of two parts are exchanged. So has a
        Transpose, whose rows are columns of its part.
        """
        assert self.has_source_rows, f"{type(self).__name__}: its rows are parts of others"
        return rows


@cache
def _field_names(node: type[Expression]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(node))


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_renamed(item, rename) for item in value)
    return value.renamed(rename) if isinstance(value, Expression) else value


@dataclass(frozen=True, slots=True)
class Source(Expression):
    """A tensor of the source, as it is."""

    name: str

    @property
    def operands(self) -> tuple[Expression, ...]:
        return ()

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        return source.read(self.name, box)

    def renamed(self, rename: Callable[[str], str]) -> Expression:
        return Source(rename(self.name))


@dataclass(frozen=True, slots=True)
class HeadRows(Expression):
    """Rows of q or k, moved within each head: halves (0, h/2)(1, h/2+1)… of the part to pairs (0, 1)(2, 3)…, or back.

    Box of whole heads: reads exactly its own rows. Other boxes: at most one more head on each side.
    """

    part: Expression
    head_dim: int
    to_halves: bool  # the result is in halves, the part in pairs

    @property
    def rows_together(self) -> int:
        return max(self.head_dim, self.part.rows_together)

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        rows = np.arange(box.offsets[0], box.offsets[0] + box.sizes[0])
        if not rows.size:
            return self.part.read(source, box)
        source_rows = self.moved(rows)
        first, last = int(source_rows.min()), int(source_rows.max())
        span = self.part.read(source, Box((first, *box.offsets[1:]), (last + 1 - first, *box.sizes[1:])))
        values: np.ndarray[Any, Any] = span[source_rows - first]
        return values

    def moved(self, rows: np.ndarray) -> np.ndarray:
        """For each row, the part's row that it is read from."""
        head, within = np.divmod(rows, self.head_dim)
        found: np.ndarray[Any, Any] = head * self.head_dim + head_order(self.head_dim, to_halves=self.to_halves)[within]
        return found

    def source_rows(self, rows: Rows) -> Rows:
        return self.part.source_rows(self.moved(np.asarray(rows)).tolist())


@cache
def head_order(head_dim: int, *, to_halves: bool) -> np.ndarray:
    """For each row of a head in the one order, its row in the other."""
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.reshape(-1)
    return np.argsort(order) if to_halves else order


@dataclass(frozen=True, slots=True)
class Stack(Expression):
    """Tensors of one shape, stacked along a new dim 0."""

    has_source_rows = False
    parts: tuple[Expression, ...]

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        (first, *offsets), (count, *sizes) = box.offsets, box.sizes
        if not count:
            return self.parts[0].read(source, Box(tuple(offsets), (0,) * len(sizes))).reshape(0, *sizes)
        within = Box(tuple(offsets), tuple(sizes))
        values = self.parts[first].read(source, within)[None]
        if count == 1:
            return values
        stacked = np.empty(box.sizes, values.dtype)
        stacked[0] = values[0]
        for number in range(1, count):
            stacked[number] = self.parts[first + number].read(source, within)
        return stacked


@dataclass(frozen=True, slots=True)
class Index(Expression):
    """One of the tensors that `part` is a stack of. `num_rows`: of each, along all but its last dim."""

    part: Expression
    number: int
    num_rows: int

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        values: np.ndarray[Any, Any] = self.part.read(source, Box((self.number, *box.offsets), (1, *box.sizes)))[0]
        return values

    def source_rows(self, rows: Rows) -> Rows:
        first = self.number * self.num_rows
        if isinstance(rows, range):
            return self.part.source_rows(range(rows.start + first, rows.stop + first))
        return self.part.source_rows((np.asarray(rows) + first).tolist())


@dataclass(frozen=True, slots=True)
class Take(Expression):
    """The part of a tensor that begins at `start` along `dim`."""

    has_other_rows = True
    has_source_rows = False
    part: Expression
    dim: int
    start: int

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        return self.part.read(source, _moved_along(box, self.dim, box.offsets[self.dim] + self.start))


_AT_ONCE = 1 << 20  # elements of a part that is joined or transposed: a box needs a few MiB besides itself


@dataclass(frozen=True, slots=True)
class Join(Expression):
    """Parts, one after another along `dim`; `shape` is that of the whole."""

    has_other_rows = True
    parts: tuple[Expression, ...]
    dim: int
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()  # of the parts along `dim`; (): all are equal

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        start, size = box.offsets[self.dim], self.shape[self.dim] // len(self.parts)
        end, begin, joined = start + box.sizes[self.dim], 0, None
        for part, length in zip(self.parts, self.sizes or (size,) * len(self.parts), strict=True):
            begin += length
            first = max(start, begin - length)
            count = min(end, begin) - first
            if count < 0 or (count == 0 and start < end):
                continue
            if count == box.sizes[self.dim]:
                return part.read(source, _moved_along(box, self.dim, first - (begin - length), count))
            step = max(1, _AT_ONCE * box.sizes[self.dim] // max(1, box.num_elements))
            for at in range(first, first + max(1, count), step):  # once if the part is empty, for its type
                num = min(step, first + count - at)
                piece = part.read(source, _moved_along(box, self.dim, at - (begin - length), num))
                if joined is None:
                    joined = np.empty(box.sizes, piece.dtype)
                joined[(slice(None),) * self.dim + (slice(at - start, at - start + num),)] = piece
        assert joined is not None  # of at least two parts
        return joined


# Rows that are read together, so that runs of the part are long. An odd multiple of 32: with one of 1024, as many lines
# of the part would share few sets of a core's cache (3 GB/s are transposed, instead of 5).
TRANSPOSED_ROWS = 31 * 32
_STRIP_BYTES = 256  # of a row that is written at once: whole cache lines. 0.2 GB/s without strips


@dataclass(frozen=True, slots=True)
class Transpose(Expression):
    """A tensor with its last two dims exchanged. A box reads its own elements, each once."""

    has_other_rows = True
    part: Expression

    @property
    def rows_together(self) -> int:
        return TRANSPOSED_ROWS

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        (*lead, first_row, first_column), (*counts, rows, columns) = box.offsets, box.sizes
        at_once, transposed = max(1, _AT_ONCE // max(1, rows)), None
        for index in np.ndindex(*counts):
            position = tuple(offset + number for offset, number in zip(lead, index, strict=True))
            for start in range(0, max(1, columns), at_once):  # once if the box is empty, for its type
                count = min(at_once, columns - start)
                within = Box((*position, first_column + start, first_row), (*(1,) * len(position), count, rows))
                read = np.ascontiguousarray(self.part.read(source, within)).reshape(count, rows)
                if transposed is None:
                    transposed = np.empty(box.sizes, read.dtype)
                    bits = transposed.view(f"u{read.itemsize}")  # numpy is slow with the types of ml_dtypes
                _transpose_into(bits[index][:, start : start + count], read.view(bits.dtype))
        if transposed is None:  # no matrix
            return self.part.read(source, _exchanged(box)).reshape(box.sizes)
        return transposed


def _transpose_into(out: np.ndarray, matrix: np.ndarray) -> None:
    strip = max(1, _STRIP_BYTES // matrix.itemsize)
    for start in range(0, len(matrix), strip):
        out[:, start : start + strip] = matrix[start : start + strip].T


def _exchanged(box: Box) -> Box:
    """The box of the transposed tensor."""
    offsets, sizes = ((*numbers[:-2], numbers[-1], numbers[-2]) for numbers in (box.offsets, box.sizes))
    return Box(offsets, sizes)


@dataclass(frozen=True, slots=True)
class AllZeros(Expression):
    """Zeros of `dtype`, for a tensor that the source does not have."""

    dtype: str

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        return np.zeros(box.sizes, numpy_dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class Fp8Blocks(Expression):
    """A matrix of float8 codes times the scales of its blocks of (rows, columns), in `dtype` (fp8.decode).

    A box reads its own codes, and the scales of the blocks that it touches.
    """

    codes: Expression
    scales: Expression
    block: tuple[int, int]
    dtype: str  # float32 or bfloat16

    @property
    def rows_together(self) -> int:
        return self.block[0]

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        codes = self.codes.read(source, box)
        if not codes.size:
            return np.empty(box.sizes, numpy_dtype(self.dtype))
        first = tuple(offset // size for offset, size in zip(box.offsets, self.block, strict=True))
        ends = (num_blocks(o + n, size) for o, n, size in zip(box.offsets, box.sizes, self.block, strict=True))
        blocks = Box(first, tuple(end - start for end, start in zip(ends, first, strict=True)))
        start = (box.offsets[0], box.offsets[1])
        return decode(codes, self.scales.read(source, blocks), self.block, start=start, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks(Expression):
    """A tensor [..., columns] of mxfp4 codes [..., blocks, 16] with their scales [..., blocks], in `dtype`.

    A box reads the blocks that it touches.
    """

    codes: Expression
    scales: Expression
    dtype: str  # float32 or bfloat16

    def read(self, source: TensorSource, box: Box) -> np.ndarray:
        (*lead, column), (*counts, columns) = box.offsets, box.sizes
        first = column // MXFP4_BLOCK
        blocks = Box((*lead, first), (*counts, num_blocks(column + columns, MXFP4_BLOCK) - first))
        codes = self.codes.read(source, Box((*blocks.offsets, 0), (*blocks.sizes, CODE_BYTES)))
        values = decode_mxfp4(codes, self.scales.read(source, blocks), self.dtype)
        start = column - first * MXFP4_BLOCK
        found: np.ndarray[Any, Any] = values[..., start : start + columns]
        return found


def _moved_along(box: Box, dim: int, offset: int, size: int | None = None) -> Box:
    """`box` with another offset, and possibly size, along one dim."""
    sizes = box.sizes if size is None else (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
    return Box((*box.offsets[:dim], offset, *box.offsets[dim + 1 :]), sizes)
