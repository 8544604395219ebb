"""Fold tensors whose names differ only in numbers into one line: `layers.{0..31}.attention.wq.weight`."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a name part that is a number
_DOT = re.compile(r"\.(?![^{]*\})(?!\{|\d+(?:\.|$))")  # except within `{0..31}` and before numbers


@dataclass(frozen=True, slots=True)
class TensorLine:
    """Tensors whose names differ only in numbers. `num_bytes` and `num_chunks` are sums."""

    name: str  # layers.{0..31}.attention.wq.weight
    section: str
    dtype: str
    shape: tuple[int, ...]
    num_tensors: int
    num_chunks: int
    num_bytes: int


def fold_lines(lines: Iterable[TensorLine]) -> list[TensorLine]:
    """Fold lines of one tensor each if dtype, shape and all but the numbers agree; in order of appearance.

    Only full products are written as one line, so that each line stands for exactly the names it shows.
    """
    folded = fold(lines, name=lambda line: line.name, alike=lambda line: (line.section, line.dtype, line.shape))
    return [
        replace(
            members[0],
            name=name,
            num_tensors=len(members),
            num_chunks=sum(line.num_chunks for line in members),
            num_bytes=sum(line.num_bytes for line in members),
        )
        for name, members in folded
    ]


def fold(items: Iterable[T], *, name: Callable[[T], str], alike: Callable[[T], Hashable]) -> list[tuple[str, list[T]]]:
    """Items in groups whose names differ only in numbers and that are `alike`, each with its folded name."""
    groups: dict[tuple[tuple[str, ...], Hashable], dict[tuple[int, ...], T]] = {}
    for item in items:
        parts = _NUMBER.split(name(item))
        groups.setdefault((tuple(parts[::2]), alike(item)), {})[tuple(map(int, parts[1::2]))] = item
    folded: list[tuple[str, list[T]]] = []
    for (texts, _), all_members in groups.items():
        repeated = _repeated(texts, list(all_members))
        firsts = sorted({*repeated})
        members = {tuple(numbers[at] for at in firsts): item for numbers, item in all_members.items()}
        for sets in _products(list(members)):
            group = [members[numbers] for numbers in product(*sets)]
            shown = ["{" + number_ranges(s) + "}" if len(s) > 1 else str(s[0]) for s in sets]
            numbers = [shown[firsts.index(at)] for at in repeated]
            text = "".join(t + n for t, n in zip(texts, [*numbers, ""], strict=True))
            folded.append((text if len(group) > 1 else name(group[0]), group))
    return folded


def fold_texts(texts: Iterable[str]) -> list[str]:
    """Fold texts that each name a tensor and differ only in the numbers of names; in order of appearance."""
    return [line.name for line in fold_lines(TensorLine(text, "", "", (), 1, 0, 0) for text in texts)]


def _repeated(texts: Sequence[str], members: Sequence[tuple[int, ...]]) -> list[int]:
    """For each number, the first one that it repeats in all members, as names in one text do; else itself."""
    found = []
    for at in range(len(members[0])):
        alike = (i for i in range(at) if all(m[i] == m[at] for m in members) and " " in "".join(texts[i + 1 : at + 1]))
        found.append(next(alike, at))
    return found


def _products(tuples: Sequence[tuple[int, ...]]) -> list[list[list[int]]]:
    """Number tuples as products of sets: [(0, 0), (0, 1), (1, 0), (1, 1)] → [[[0, 1], [0, 1]]]."""
    if not tuples[0]:
        return [[]]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in tuples:
        rests.setdefault(first, []).append(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, found in rests.items():
        alike.setdefault(frozenset(found), []).append(first)
    return [[sorted(firsts), *sets] for rest, firsts in alike.items() for sets in _products(sorted(rest))]


def number_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] → `0..2,5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ",".join(f"{a}..{b}" if b > a else str(a) for a, b in parts)


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A row of the tree of names: a tensor line, or a part of names with the sums of its children."""

    depth: int
    name: str
    line: TensorLine | None
    num_tensors: int
    num_chunks: int
    num_bytes: int


def tree_rows(lines: Sequence[TensorLine]) -> list[TreeRow]:
    """The lines as a tree of the parts of their names. A part with a single child shares its row (`wq.weight`)."""
    root: dict[Any, Any] = {}
    for line in lines:
        node = root
        for part in _DOT.split(line.name):
            node = node.setdefault(part, {})
        node.setdefault(None, []).append(line)  # several if they differ in dtype or shape
    return _rows(root, 0)


def _rows(node: Mapping[Any, Any], depth: int) -> list[TreeRow]:
    rows = []
    for part, child in node.items():
        if part is None:
            continue
        name = part
        while len(child) == 1 and None not in child:
            ((part, child),) = child.items()
            name += f".{part}"
        for line in child.get(None, ()):
            rows.append(TreeRow(depth, name, line, line.num_tensors, line.num_chunks, line.num_bytes))
        below = _rows(child, depth + 1)
        if below:
            tops = [row for row in below if row.depth == depth + 1]
            sums = (sum(r.num_tensors for r in tops), sum(r.num_chunks for r in tops), sum(r.num_bytes for r in tops))
            rows.append(TreeRow(depth, name, None, *sums))
            rows += below
    return rows
