"""Plan what a conversion writes, before the first byte: source view, casts, files, and what is left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.catalog import TensorInfo, count_dtypes
from converters.containers.target import Target
from converters.dtypes import DTYPES, itemsize
from converters.engine.copy import RowNumbers
from converters.errors import ConfigError
from converters.families.registry import get_family
from converters.formats.base import Contents, Format, OutputOptions
from converters.view import foreign_view, is_named
from converters.weights import NativeWeights

DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The view that the tensors are read from, the target that they are written to, and their casts."""

    contents: Contents
    target: Target
    casts: Mapping[str, str]
    kept_float32: tuple[str, ...]  # native names of tensors that a cast to 16 bits leaves as they are
    stored: Mapping[str, str]  # target name → the source's own name
    native_rows: RowNumbers | None  # None: rows are written in native order


def plan_conversion(
    weights: NativeWeights, *, dst: Path, output: Format, options: OutputOptions, dtype: str | None
) -> ConversionPlan:
    """Plan writing `weights` as `output`. Raises UnsupportedError where it cannot hold this model."""
    output.check_options(options)
    family = get_family(weights.info.family)
    naming = output.naming(family, options)
    view = weights.source if naming is None else foreign_view(weights.source, weights.info, naming)
    native = weights.source.ledger.used
    native_of = {name: name for name in view.tensors} if naming is None else view.ledger.used
    native_casts = find_casts(weights.source.tensors, dtype, keep=family.keep_float32)
    casts = {name: native_casts[held] for name, held in native_of.items() if held in native_casts}
    tensors = {n: TensorInfo(casts.get(n, info.dtype), info.shape) for n, info in view.tensors.items()}
    contents = Contents(tensors, view, family, weights.info, dst)
    return ConversionPlan(
        contents=contents,
        target=output.plan(contents, options),
        casts=casts,
        kept_float32=tuple(find_kept_float32(weights.source.tensors, dtype, keep=family.keep_float32)),
        stored={name: native[held] for name, held in native_of.items()},
        native_rows=None if naming is None else view.native_rows,
    )


def find_casts(tensors: Mapping[str, TensorInfo], dtype: str | None, *, keep: Sequence[str] = ()) -> dict[str, str]:
    """The floating tensors that are cast to `dtype`; none where it is None (the source dtype stays).

    Those of `find_kept_float32` stay float32.
    """
    if dtype is None:
        return {}
    name, kept = _floating(dtype), set(find_kept_float32(tensors, dtype, keep=keep))
    return {
        n: name
        for n, info in tensors.items()
        if info.dtype != name and DTYPES[info.dtype].is_floating and n not in kept
    }


def find_kept_float32(tensors: Mapping[str, TensorInfo], dtype: str | None, *, keep: Sequence[str] = ()) -> list[str]:
    """Tensors that stay float32 when the others are cast to 16 bits or less.

    A few float32 tensors among weights of 16 bits (most, by bytes) are so on purpose. `keep`: native names, with
    `{n}` for the layer, that a family always wants in float32.
    """
    if dtype is None or itemsize(_floating(dtype)) > 2:
        return []
    wide = [n for n, info in tensors.items() if info.dtype == "float32"]
    floating = {n: info for n, info in tensors.items() if DTYPES[info.dtype].is_floating}
    num_bytes = count_dtypes(floating)
    narrow_bytes = sum(size for kind, size in num_bytes.items() if itemsize(kind) <= 2)
    if narrow_bytes > sum(num_bytes.values()) - narrow_bytes:
        return wide
    return [n for n in wide if is_named(n, keep)]


def _floating(dtype: str) -> str:
    """The name of an element type as a user may spell it. Raises ConfigError where it is not a floating type."""
    name = DTYPE_SPELLINGS.get(dtype, dtype)
    if name not in DTYPES or not DTYPES[name].is_floating:
        floating = ", ".join(d.name for d in DTYPES.values() if d.is_floating)
        raise ConfigError(f"unknown floating element type: {dtype!r}", hint=f"known: {floating}")
    return name
