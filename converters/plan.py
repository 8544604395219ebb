"""What a conversion will write, settled before the first byte: source view, casts, files, and what is left out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from converters.catalog import Catalog, TensorInfo
from converters.dtypes import DTYPES, itemsize
from converters.errors import ConfigError
from converters.families.registry import get_family
from converters.formats.dcp_write import plan_dcp
from converters.formats.safetensors_write import plan_safetensors
from converters.formats.target import Target
from converters.formats.torch_write import plan_torch
from converters.layout import MeshShape, boxes_for_any_mesh, boxes_for_mesh, check_mesh
from converters.names import META_SHARD, section_of
from converters.view import View, foreign_view
from converters.weights import NativeWeights

Format = Literal["dcp", "hf", "meta"]
DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """A view that gives the tensors, the target that takes them, and the dtype each one is cast to."""

    view: View
    target: Target
    casts: Mapping[str, str]
    stored: Mapping[str, str]  # target name → the source's own name


def plan_conversion(
    weights: NativeWeights, *, to: Format, dtype: str | None, mesh: MeshShape | None, shard_bytes: int
) -> ConversionPlan:
    """Plan writing `weights` as `to`. `mesh` and `shard_bytes` say how a DCP and a safetensors output are cut."""
    family, args = get_family(weights.info.family), weights.info.args
    if mesh is not None:
        check_mesh(mesh, args)
    view = weights.source if to == "dcp" else foreign_view(weights.source, weights.info, family.namings[to])
    native = weights.source.ledger.used
    stored = native if view is weights.source else {name: native[held] for name, held in view.ledger.used.items()}
    casts = find_casts(view.tensors, dtype)
    tensors = {n: TensorInfo(casts.get(n, info.dtype), info.shape) for n, info in view.tensors.items()}
    if to == "hf":
        return ConversionPlan(view, plan_safetensors(tensors, shard_bytes=shard_bytes), casts, stored)
    if to == "meta":
        family.meta_params(args)  # where params.json cannot say what the model is, this raises now, not after the copy
        file, shared = META_SHARD.format(index=0), _second_names(view.ledger.used)
        return ConversionPlan(view, plan_torch(tensors, file=file, shared=shared), casts, stored)
    if mesh is None:
        files = boxes_for_any_mesh(tensors, file_bytes=shard_bytes)
    else:
        files = boxes_for_mesh(
            family.parameters(args), mesh, itemsizes={n: itemsize(info.dtype) for n, info in tensors.items()}
        )
    return ConversionPlan(view, plan_dcp(tensors, files), casts, stored)


def _second_names(used: Mapping[str, str]) -> dict[str, str]:
    """Target names whose source an earlier target name has too, with that name: the output of a tied model."""
    first: dict[str, str] = {}
    return {name: first[source] for name, source in used.items() if first.setdefault(source, name) != name}


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


def count_dtypes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes by element type, the most first."""
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += prod(info.shape) * itemsize(info.dtype)
    return dict(sizes.most_common())
