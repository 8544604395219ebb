"""What a checkpoint holds, from headers alone: the model, its tensors folded over layers, its sections."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converters.catalog import Catalog
from converters.errors import CheckpointError, UnsupportedError
from converters.families.registry import get_family
from converters.formats.dcp_item import read_blob_item
from converters.manifest import read_manifest
from converters.model_info import read_model_info, says_model
from converters.names import OPTIMIZER, section_of
from converters.open import open_checkpoint
from converters.read import CatalogReader
from converters.weights import model_part, naming_of

_SHOWN_BLOB_BYTES = 64 * 1024  # larger values are named and sized only
_PARAM_GROUPS = f"{OPTIMIZER}.param_groups."
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a name part that is a number


@dataclass(frozen=True, slots=True)
class TensorLine:
    """Tensors that differ in a layer number only. `num_bytes` and `num_chunks` are of all of them together."""

    name: str  # layers.{0..31}.attention.wq.weight
    section: str
    dtype: str
    shape: tuple[int, ...]
    num_tensors: int
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint at a glance. `model` is None where nothing says what it is, or what says so is wrong: then
    `model_problem` tells how. `values` are small plain entries."""

    path: str
    container: str
    naming: str
    model: dict[str, Any] | None
    model_problem: str
    num_parameters: int
    num_bytes: int
    num_files: int
    lines: tuple[TensorLine, ...]
    num_values: int
    values: dict[str, Any]
    has_manifest: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(path: Path | str, *, fold: bool = True, model_from: Path | str | None = None) -> Inspection:
    """Describe a checkpoint of any format. Reads headers and small values; never a tensor.

    `model_from`: a folder that says what the model is, where the checkpoint does not.
    """
    catalog = open_checkpoint(path)
    weights = model_part(catalog)
    place = Path(model_from) if model_from else catalog.root
    naming, model, problem = "unknown", None, ""
    try:
        info = read_model_info(place, weights)
        model = {"family": info.family, **asdict(info.args)}
        naming = naming_of(catalog, get_family(info.family)).name
    except (CheckpointError, UnsupportedError) as error:  # it can be listed all the same
        problem = error.message if model_from or says_model(place) else ""
    files = {c.file for t in catalog.tensors.values() for c in t.chunks} | {b.file for b in catalog.blobs.values()}
    values = read_values(catalog)
    return Inspection(
        path=str(path),
        container=catalog.container,
        naming=naming,
        model=model,
        model_problem=problem,
        num_parameters=sum(_num_elements(t.shape) for t in weights.tensors.values()),
        num_bytes=catalog.num_bytes,
        num_files=len(files),
        lines=tuple(fold_lines(catalog) if fold else _lines(catalog)),
        num_values=len(catalog.blobs) + len(catalog.values),
        values=values,
        has_manifest=read_manifest(catalog.root) is not None,
    )


def read_values(catalog: Catalog) -> dict[str, Any]:
    """Small plain values by name. What is not plain (a pickled object) is named by its size and never decoded."""
    values = dict(catalog.values)
    with CatalogReader(catalog) as reader:
        for name, blob in catalog.blobs.items():
            values[name] = f"<{blob.length:,} bytes>"
            if blob.length <= _SHOWN_BLOB_BYTES:
                try:
                    values[name] = read_blob_item(reader.read_blob(name), what=name)
                except CheckpointError:
                    continue
    return values


def summarize_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with an optimizer's settings folded: one line each, since parameters seldom differ in them."""
    summary: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {}  # setting → repr → value
    for name, value in values.items():
        if name.startswith(_PARAM_GROUPS):
            settings.setdefault(name.rpartition(".")[2], {}).setdefault(repr(value), value)
        else:
            summary[name] = value
    for setting, found in settings.items():
        shown = next(iter(found.values())) if len(found) == 1 else " | ".join(found)
        summary[f"{_PARAM_GROUPS}*.{setting}"] = shown
    return summary


def _num_elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _lines(catalog: Catalog) -> Iterable[TensorLine]:
    for name, entry in catalog.tensors.items():
        section = section_of(name) if catalog.container == "dcp" else "model"
        yield TensorLine(name, section, entry.dtype, entry.shape, 1, len(entry.chunks), entry.num_bytes)


def fold_lines(catalog: Catalog) -> list[TensorLine]:
    """One line for tensors that are alike but for the first number in their names, in order of appearance."""
    groups: dict[tuple, list[TensorLine]] = {}
    for line in _lines(catalog):
        pattern = _LAYER.sub("{}", line.name, count=1)
        groups.setdefault((pattern, line.dtype, line.shape), []).append(line)
    return [_fold(pattern, group) for (pattern, _, _), group in groups.items()]


def _fold(pattern: str, group: Sequence[TensorLine]) -> TensorLine:
    first = group[0]
    name = first.name
    if len(group) > 1:
        name = pattern.replace("{}", "{" + _ranges(sorted(int(_LAYER.search(g.name).group()) for g in group)) + "}", 1)
    return TensorLine(
        name,
        first.section,
        first.dtype,
        first.shape,
        len(group),
        sum(g.num_chunks for g in group),
        sum(g.num_bytes for g in group),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] → `0..2,5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ",".join(f"{a}..{b}" if b > a else str(a) for a, b in parts)
