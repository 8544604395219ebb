"""What a conversion will write, settled before the first byte: source view, casts, files, and what is left out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from converters.catalog import Catalog, TensorInfo
from converters.copy import RowNumbers
from converters.dtypes import DTYPES
from converters.errors import ConfigError
from converters.families.registry import get_family
from converters.formats.target import Target
from converters.names import section_of
from converters.outputs.base import Contents, Output, OutputOptions
from converters.view import foreign_view
from converters.weights import NativeWeights

DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """A view that gives the tensors, the target that takes them, and the dtype each one is cast to."""

    contents: Contents
    target: Target
    casts: Mapping[str, str]
    stored: Mapping[str, str]  # target name → the source's own name
    native_rows: RowNumbers | None  # None: rows are written in native order


def plan_conversion(
    weights: NativeWeights, *, dst: Path, output: Output, options: OutputOptions, dtype: str | None
) -> ConversionPlan:
    """Plan writing `weights` as `output`. Raises before anything is written where it cannot hold this model."""
    output.check_options(options)
    family = get_family(weights.info.family)
    naming = output.naming(family, options)
    view = weights.source if naming is None else foreign_view(weights.source, weights.info, naming)
    native = weights.source.ledger.used
    stored = native if naming is None else {name: native[held] for name, held in view.ledger.used.items()}
    casts = find_casts(view.tensors, dtype)
    tensors = {n: TensorInfo(casts.get(n, info.dtype), info.shape) for n, info in view.tensors.items()}
    contents = Contents(tensors, view, family, weights.info, dst)
    native_rows = None if naming is None else view.native_rows
    return ConversionPlan(contents, output.plan(contents, options), casts, stored, native_rows)


def find_casts(tensors: Mapping[str, TensorInfo], dtype: str | None) -> dict[str, str]:
    """Which floating tensors change their element type for `dtype`; none where it is None (the source dtype stays)."""
    if dtype is None:
        return {}
    name = DTYPE_SPELLINGS.get(dtype, dtype)
    if name not in DTYPES or not DTYPES[name].is_floating:
        floating = ", ".join(d.name for d in DTYPES.values() if d.is_floating)
        raise ConfigError(f"no floating element type is called {dtype!r}", hint=f"known: {floating}")
    return {n: name for n, info in tensors.items() if info.dtype != name and DTYPES[info.dtype].is_floating}


def sections_left_out(catalog: Catalog) -> dict[str, int]:
    """Sections of a training checkpoint that are not weights, with their number of entries."""
    if catalog.container != "dcp":
        return {}
    names = [*catalog.tensors, *catalog.blobs]
    return dict(Counter(section for name in names if (section := section_of(name)) != "model"))
