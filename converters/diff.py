"""Compare two checkpoints of any formats, tensor by tensor in bounded memory, weights under their native names."""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from os.path import commonprefix
from typing import Any

import numpy as np

from converters.common.box import Box, TensorInfo, TensorSource
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, ConfigError
from converters.common.fold import number_ranges
from converters.conversion.records import Progress, no_progress
from converters.engine.read import CatalogReader
from converters.families.args import computed_numbers
from converters.families.base import Naming
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo, describes_model
from converters.naming.foreign_view import foreign_view
from converters.naming.namings import fused_with, namings_for
from converters.naming.native_view import Reading
from converters.source.models_inside import SeveralModels
from converters.source.open import open_checkpoint
from converters.source.weights import model_part, native_weights
from converters.store.location import Place
from converters.views.catalog import Catalog
from converters.views.compare import Deviation, first_differing_block, measure_gap
from converters.views.expressions import HeadRows, Source, Transpose
from converters.views.view import Ledger, View


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints differ."""

    name: str
    kind: str  # "only in A" | "only in B" | "dtype" (values equal, or rounded) | "shape" | "values" | "model"
    detail: str
    max_abs: float | None = None  # of values: max |A - B|
    relative: float | None = None  # |A - B| / |A|, Frobenius norms


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The tensors that were compared, and every difference, in order."""

    a: str
    b: str
    by: str  # how tensors were matched: "native names" or "names as stored"
    num_equal: int
    num_compared_bytes: int
    differences: tuple[Difference, ...]
    not_compared: Mapping[str, str]
    notes: tuple[str, ...]  # differences that do not change what the model computes
    remarks: tuple[str, ...]  # how each side was opened

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def first_tensor(self) -> str | None:
        """The first tensor that differs, in the order of A's model; None if none does."""
        return next((d.name for d in self.differences if d.kind != "model"), None)

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.equal, "first_tensor": self.first_tensor, **asdict(self)}


# A limit, not a number of the computation; Meta's and torchtune's files do not have it.
_NO_DIFFERENCE = ("max_seq_len",)


@dataclass(slots=True)
class _Side:
    """A checkpoint opened for comparison."""

    catalog: Catalog
    weights: TensorSource
    extras: tuple[str, ...]  # of the weights: beside the text model of a multimodal checkpoint
    info: ModelInfo | None
    sections: CatalogReader  # everything but the weights


def diff(
    a: Place,
    b: Place,
    *,
    select: Sequence[str] = (),
    model_from: Place | None = None,
    progress: Progress = no_progress,
) -> DiffReport:
    """Compare `a` with `b`: structure, dtypes, values; of DCP checkpoints also the other sections.

    If only one describes its model, the other is read as the same; if neither does, names are compared as
    stored. A section such as the optimizer is compared if both have it; else `not_compared` says so.
    `select`: the model of a checkpoint that holds several; two names are that of `a` and that of `b`.
    """
    with ExitStack() as stack:
        side_a, side_b = _open_both(_opened(a, b, select), model_from, stack)
        differences, notes = _model_differences(side_a.info, side_b.info)
        not_compared = {}
        sections = [_section_names(side) for side in (side_a, side_b)]
        for section in sorted(sections[0].keys() ^ sections[1].keys()):
            not_compared[section] = f"only in {'A' if section in sections[0] else 'B'}"
        not_compared |= dict.fromkeys(_lacking(side_a) & _lacking(side_b), "in neither")
        if bool(side_a.extras) != bool(side_b.extras):
            not_compared |= _leave_out(side_a if side_a.extras else side_b, f"only in {'A' if side_a.extras else 'B'}")
        both = sections[0].keys() & sections[1].keys()
        pairs: list[tuple[TensorSource, TensorSource, ModelInfo | None]]
        pairs = [(side_a.weights, side_b.weights, side_a.info or side_b.info)]
        if both:
            pairs.append((_SectionsOf(side_a.sections, both), _SectionsOf(side_b.sections, both), None))
        total = sum(_common_bytes(x, y) for x, y, _ in pairs)
        num_equal = 0
        with progress(total, "comparing") as advance:
            for x, y, info in pairs:
                pair_differences, equal = _compare_sources(x, y, info, advance)
                differences += pair_differences
                num_equal += equal
        differences += _value_differences(side_a, side_b, both)
    remarks = tuple(f"{path}: {text}" for path, side in ((a, side_a), (b, side_b)) for text in side.catalog.notes)
    by = "native names" if side_a.info else "names as stored"
    return DiffReport(str(a), str(b), by, num_equal, total, tuple(differences), not_compared, tuple(notes), remarks)


def _leave_out(side: _Side, why: str) -> dict[str, str]:
    """Compare `side` without its tensors beside the text model; their modules → why."""
    tensors = {name: info for name, info in side.weights.tensors.items() if name not in side.extras}
    assert isinstance(side.weights, View)
    side.weights = replace(side.weights, tensors=tensors)
    return dict.fromkeys((name.partition(".")[0] for name in side.extras), why)


def _opened(a: Place, b: Place, select: Sequence[str]) -> list[Catalog]:
    """Both catalogs. One name in `select` is of the side that holds several models, or of both."""
    if len(select) > 2:
        raise ConfigError("--select: at most two names, the model of A and that of B")
    if len(select) == 2:
        return [open_checkpoint(path, select=name) for path, name in zip((a, b), select, strict=True)]
    catalogs = []
    for path in (a, b):
        try:
            catalogs.append(open_checkpoint(path))
        except SeveralModels:
            if not select:
                raise
            catalogs.append(open_checkpoint(path, select=select[0]))
    if select and all(catalog.selected is None for catalog in catalogs):
        raise ConfigError(f"--select {select[0]}: {a} and {b} hold one model each", hint="leave --select out")
    return catalogs


def _open_both(catalogs: Sequence[Catalog], model_from: Place | None, stack: ExitStack) -> tuple[_Side, _Side]:
    says = [describes_model(catalog.root) for catalog in catalogs]
    # If only one describes its model, the other is read as the same
    places = [
        model_from or (None if says_model or not any(says) else catalogs[says.index(True)].root) for says_model in says
    ]
    sides = []
    for catalog, folder in zip(catalogs, places, strict=True):
        if model_from or any(says):
            # an incomplete output of titan (`convert --allow-missing`) is compared as far as it goes
            partial = catalog.manifest is not None
            opened = stack.enter_context(
                native_weights(
                    catalog, Reading(allow_missing=partial, keep_mtp=True, keep_extra=True), model_from=folder
                )
            )
            weights: TensorSource = opened.source
            extras = opened.extras
            info: ModelInfo | None = opened.info
        else:
            weights, info, extras = stack.enter_context(CatalogReader(model_part(catalog))), None, ()
        inside = model_part(catalog).tensors
        outside = {n: t for n, t in catalog.tensors.items() if n not in inside}
        sides.append(
            _Side(catalog, weights, extras, info, stack.enter_context(CatalogReader(replace(catalog, tensors=outside))))
        )
    return sides[0], sides[1]


def _section_names(side: _Side) -> dict[str, None]:
    names = (*side.sections.tensors, *side.catalog.values)
    return {side.catalog.section_of(name): None for name in names}


def _lacking(side: _Side) -> Set[str]:
    """The parameters of the model that the checkpoint lacks."""
    if side.info is None:
        return set()
    return {p.fqn for p in get_family(side.info.family).parameters(side.info.args)} - side.weights.tensors.keys()


@dataclass(slots=True)
class _SectionsOf:
    """The tensors of some sections of a source."""

    source: CatalogReader
    tensors: Mapping[str, TensorInfo]

    def __init__(self, source: CatalogReader, sections: set[str]):
        self.source = source
        self.tensors = {n: info for n, info in source.tensors.items() if source.catalog.section_of(n) in sections}

    def read(self, fqn: str, box: Box) -> np.ndarray:
        return self.source.read(fqn, box)


def _model_differences(a: ModelInfo | None, b: ModelInfo | None) -> tuple[list[Difference], list[str]]:
    """Differences between the models' numbers, which do not all show in shapes; and notes about mere limits."""
    if a is None or b is None:
        return [], []
    in_a, in_b = ({"family": info.family, **computed_numbers(info.args)} for info in (a, b))
    changed = {key: f"{in_a[key]} in A, {in_b.get(key)} in B" for key in in_a if in_a[key] != in_b.get(key)}
    notes = [
        f"{key}: {changed[key]} (a limit without effect on the computation)" for key in _NO_DIFFERENCE if key in changed
    ]
    return [Difference(key, "model", text) for key, text in changed.items() if key not in _NO_DIFFERENCE], notes


def _common_bytes(a: TensorSource, b: TensorSource) -> int:
    return sum(
        Box.whole(i.shape).num_elements * itemsize(i.dtype)
        for n, i in a.tensors.items()
        if n in b.tensors and b.tensors[n].shape == i.shape
    )


def _compare_sources(
    a: TensorSource, b: TensorSource, info: ModelInfo | None, advance: Callable[[int], None]
) -> tuple[list[Difference], int]:
    """Differences between two sources, and how many tensors are equal."""
    differences, equal = [], 0
    for name in (*a.tensors, *(n for n in b.tensors if n not in a.tensors)):
        x, y = a.tensors.get(name), b.tensors.get(name)
        if x is None or y is None:
            there = "B" if x is None else "A"
            present = (b if x is None else a).tensors[name]
            differences.append(Difference(name, f"only in {there}", f"{present.dtype} {list(present.shape)}"))
        elif x.shape != y.shape:
            transposed = x.dtype == y.dtype and len(x.shape) > 1 and x.shape == (*y.shape[:-2], *y.shape[:-3:-1])
            reason = "equal after a transpose; " if transposed and _same_bits(_transposed(a, name), b, name) else ""
            differences.append(Difference(name, "shape", f"{reason}{list(x.shape)} in A, {list(y.shape)} in B"))
        elif gap := measure_gap(a, b, name, advance):
            differences.append(_describe(a, b, name, gap, info))
        else:
            equal += 1
    return differences, equal


def _describe(a: TensorSource, b: TensorSource, name: str, gap: Deviation, info: ModelInfo | None) -> Difference:
    x, y = a.tensors[name], b.tensors[name]
    total = Box.whole(x.shape).num_elements
    dtypes = [f"{x.dtype} in A, {y.dtype} in B"] if x.dtype != y.dtype else []
    if not gap.num_different:
        text = "values are equal" if dtypes else "bits differ (-0.0 or NaN), values are equal"
        return Difference(name, "dtype", "; ".join([*dtypes, text]), gap.max_abs, gap.relative)
    if gap.rounded:
        source, dtype = ("B", x.dtype) if gap.rounded == "A" else ("A", y.dtype)
        text = f"{gap.rounded} is {source}, cast to {dtype}: {gap.num_different:,} of {total:,} values were rounded"
        return Difference(name, "dtype", "; ".join([*dtypes, text]), gap.max_abs, gap.relative)
    assert gap.first is not None
    details = [*dtypes, f"{gap.num_different:,} of {total:,} values differ, first at {list(gap.first)}"]
    if gap.experts:
        all_of_them = len(gap.experts) == x.shape[0]
        details.append("in all experts" if all_of_them else f"in experts {number_ranges(gap.experts)}")
    if reason := _explained(a, b, name, info):
        details.insert(0, reason)
    return Difference(name, "values", "; ".join(details), gap.max_abs, gap.relative)


def _explained(a: TensorSource, b: TensorSource, name: str, info: ModelInfo | None) -> str:
    """Why two tensors differ, if it is a known mix-up, for the whole tensor; else ""."""
    if a.tensors[name] != b.tensors[name]:
        return ""
    for candidate in fused_with(name, get_family(info.family)) if info else ():
        is_alike = candidate != name and b.tensors.get(candidate) == a.tensors[name]
        if is_alike and first_differing_block(a, name, b, candidate) is None:
            return f"equal to {candidate}: {_pair(name, candidate)} are swapped"
    if len(a.tensors[name].shape) > 2:
        by_text = sorted(range(a.tensors[name].shape[0]), key=str)
        for x, y in ((a, b), (b, a)):
            if _same_bits(_Reordered(x, by_text), y, name):
                return "equal in another order of experts: one was stacked in the order of text, 10 before 2"
    for naming in namings_for(info) if info else ():
        for x, y in ((a, b), (b, a)):
            assert info is not None
            permuted = _under_native_name(x, name, info, naming)
            if permuted is not None and _same_bits(permuted, y, name):
                return "equal after the RoPE permutation: one was permuted once too often, or not at all"
    shape = a.tensors[name].shape
    if len(shape) > 1 and shape[-1] == shape[-2] and _same_bits(_transposed(a, name), b, name):
        return "equal after a transpose"
    return ""


def _pair(name: str, other: str) -> str:
    """A noun for two tensors that another naming has as one: "gate and up", else "the two"."""
    halves = (set(each.split(".")) - {"weight", "bias"} for each in (name, other))
    return "gate and up" if {"w1", "w3"} == set.symmetric_difference(*halves) else "the two"


def _under_native_name(source: TensorSource, name: str, info: ModelInfo, naming: Naming) -> TensorSource | None:
    """`name` in the row order of `naming`, or None if that naming keeps its rows."""
    view = foreign_view(source, info, naming)
    moved = next(
        (
            expression
            for expression in view.expressions.values()
            if isinstance(expression, HeadRows) and expression.sources == (name,)
        ),
        None,
    )
    if moved is None:
        return None
    return View(source, {name: source.tensors[name]}, {name: moved}, Ledger({name: (name,)}))


@dataclass(frozen=True, slots=True)
class _Reordered:
    """A source whose stacks are read in another order."""

    source: TensorSource
    order: Sequence[int]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.source.tensors

    def read(self, fqn: str, box: Box) -> np.ndarray:
        numbers = self.order[box.offsets[0] : box.offsets[0] + box.sizes[0]]
        parts = [self.source.read(fqn, Box((n, *box.offsets[1:]), (1, *box.sizes[1:]))) for n in numbers]
        return np.concatenate(parts)


def _transposed(source: TensorSource, name: str) -> TensorSource:
    """`name` with its last two dims exchanged."""
    info = source.tensors[name]
    *lead, rows, columns = info.shape
    turned = TensorInfo(info.dtype, (*lead, columns, rows))
    return View(source, {name: turned}, {name: Transpose(Source(name))}, Ledger({name: (name,)}))


def _same_bits(a: TensorSource, b: TensorSource, name: str) -> bool:
    return first_differing_block(a, name, b, name) is None


def _value_differences(a: _Side, b: _Side, sections: Set[str]) -> list[Difference]:
    """Differences of non-tensor entries in sections that both have: as bytes, then as values if they are plain."""
    names_a, names_b = (_values_in(side, sections) for side in (a, b))
    differences = [Difference(n, "only in A", "a value") for n in sorted(names_a - names_b)]
    differences += [Difference(n, "only in B", "a value") for n in sorted(names_b - names_a)]
    for name in sorted(names_a & names_b):
        are_items = all(side.catalog.values[name].item for side in (a, b))
        if are_items and a.sections.read_blob(name) == b.sections.read_blob(name):
            continue
        try:
            value_a, value_b = a.sections.read_value(name), b.sections.read_value(name)
        except CheckpointError:
            differences.append(Difference(name, "values", "bytes differ; not plain values, so they are not decoded"))
            continue
        if type(value_a) is not type(value_b) or value_a != value_b and not (value_a != value_a and value_b != value_b):
            differences.append(Difference(name, "values", in_both(value_a, value_b)))
    return differences


def in_both(left: Any, right: Any) -> str:
    """The parts of two values that differ: of JSON objects and dicts by key, of long texts where they differ first."""
    a, b = _items(left), _items(right)
    if a and b:
        keys = [key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key]]
        parts = []
        for key in keys[:_MOST_KEYS]:
            if key in a and key in b:
                parts.append(f"{key}: {in_both(a[key], b[key])}")
            else:
                parts.append(f"{key}: only in {'A' if key in a else 'B'}")
        if parts:
            return "; ".join(parts) + (f"; … and {len(keys) - len(parts)} more keys" if len(keys) > len(parts) else "")
    texts = [_as_text(left), _as_text(right)]
    if texts[0] == texts[1]:
        texts = [f"{type(value).__name__} {text}" for value, text in zip((left, right), texts, strict=True)]
    if max(map(len, texts)) > _MOST_CHARACTERS:
        start = max(0, len(commonprefix(texts)) - _MOST_CHARACTERS // 3)
        end = start + _MOST_CHARACTERS
        texts = ["…" * (start > 0) + text[start:end] + "…" * (len(text) > end) for text in texts]
    return f"{texts[0]} in A, {texts[1]} in B"


_MOST_KEYS, _MOST_CHARACTERS = 4, 40


def _items(value: Any) -> dict[str, Any]:
    """The values of a dict or of the text of a JSON object, nested keys joined by dots; empty for another value."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        nested = _items(inner) if isinstance(inner, dict) else {}
        found |= {f"{key}.{name}": each for name, each in nested.items()} if nested else {str(key): inner}
    return found


def _as_text(value: Any) -> str:
    """The shortest text that stands for the value."""
    short = f"{value:g}" if isinstance(value, float) else ""
    return short if short and float(short) == value else repr(value)


def _values_in(side: _Side, sections: Set[str]) -> set[str]:
    return {name for name in side.catalog.values if side.catalog.section_of(name) in sections}
