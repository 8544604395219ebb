"""Describe a checkpoint from headers alone: the model, its tensors folded over layers, its sections."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from converters.common.box import Box, TensorInfo, count_dtypes
from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.fold import TensorLine, fold_lines
from converters.common.names import OPTIMIZER
from converters.engine.read import CatalogReader
from converters.families.args import DecoderArgs, args_to_json
from converters.families.base import Naming
from converters.families.blocks import Experts, GroupedQuery
from converters.families.parameters import Role
from converters.families.registry import all_families, get_family
from converters.model.model_info import ModelInfo, describes_model
from converters.model.mtp import num_mtp_layers
from converters.naming.namings import is_named
from converters.naming.native_view import Reading
from converters.quantized.quantized_tensors import QuantizedTensors
from converters.source.model_from import find_model_info
from converters.source.open import open_checkpoint
from converters.source.weights import model_part, naming_of, native_weights, quantized_tensors
from converters.store.location import Place
from converters.views.catalog import Catalog

_SHOWN_ITEM_BYTES = 64 * 1024  # of larger values only name and size are shown
_PARAM_GROUPS = f"{OPTIMIZER}.param_groups."
_READING = Reading(keep_mtp=True, keep_extra=True, reads_copies=False)
_STEPS = ("train_state.step", "step", "global_step", "trainer.global_step")


@dataclass(frozen=True, slots=True)
class Inspection:
    """The description of a checkpoint.

    `model` is None if no file describes it, or if that file is wrong: then `model_problem` says why. `values` are
    small plain entries.
    """

    path: str
    container: str
    naming: str
    selected: str  # the place of the model, if the checkpoint holds several; else ""
    model: dict[str, Any] | None
    model_problem: str
    quantization: dict[str, Any] | None  # of the weights: scheme, number of weights, bytes of codes and of scales
    step: int | None  # of training, if a value has it
    num_parameters: int
    dtypes: dict[str, int]  # bytes of the weights by element type, the largest first
    num_bytes: int
    num_files: int
    num_chunks: int
    lines: tuple[TensorLine, ...]
    num_values: int
    values: dict[str, Any]
    has_manifest: bool
    notes: tuple[str, ...]  # on prefixes removed from names and weight files that were not read
    parts: tuple[str, ...]  # of the model, beyond what every decoder has; not in the JSON

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "parts"}


def inspect_checkpoint(
    path: Place, *, fold: bool = True, select: str | None = None, model_from: Place | None = None
) -> Inspection:
    """Describe a checkpoint of any format. Reads headers and small values, and no tensor but the step.

    `model_from`: a folder that describes the model, if the checkpoint does not. `select`: the model, if the
    checkpoint holds several.
    """
    catalog = open_checkpoint(path, select=select)
    weights = model_part(catalog)
    naming, model, problem = "unknown", None, ""
    parts: tuple[str, ...] = ()
    quantized: QuantizedTensors | None = None
    try:
        info = find_model_info(catalog, weights, model_from=model_from)
        model = {"family": info.family, **args_to_json(info.args)}
        tensor_naming = naming_of(catalog, get_family(info.family), info.args)
        parts, naming = _parts(info, weights, tensor_naming), tensor_naming.name
        quantized = quantized_tensors(catalog, info)
        if quantized is None:  # else its own problems are listed
            with native_weights(catalog, _READING, model_from=model_from):
                pass
    except (CheckpointError, UnsupportedError) as error:  # its tensors can be listed nevertheless
        problem = error.message if model_from or describes_model(catalog.root) else ""
        naming = _naming_by_names(catalog) if naming == "unknown" else naming
    scales = quantized.scales if quantized else {}
    values, lines = read_values(catalog), _lines(catalog, weights)
    return Inspection(
        path=str(path),
        container=catalog.container,
        naming=naming,
        selected=catalog.place_of_selected,
        model=model,
        model_problem=problem,
        quantization=_quantization(catalog, quantized),
        step=_step(catalog, values),
        num_parameters=sum(
            prod(quantized.scheme.values_shape(t.shape) if quantized and n in quantized.expressions else t.shape)
            for n, t in weights.tensors.items()
            if n not in scales
        ),
        dtypes=count_dtypes({n: TensorInfo(t.dtype, t.shape) for n, t in weights.tensors.items()}),
        num_bytes=catalog.num_bytes,
        num_files=len(catalog.files),
        num_chunks=sum(len(t.chunks) for t in catalog.tensors.values()),
        lines=tuple(fold_lines(lines) if fold else lines),
        num_values=len(catalog.values),
        values=values,
        has_manifest=catalog.manifest is not None,
        notes=(*catalog.notes, *_describe_payloads(catalog)),
        parts=parts,
    )


def _describe_payloads(catalog: Catalog) -> list[str]:
    """Notes on items that are smaller than the tensors that .metadata lists: an optimizer's in 8 bits, for example."""
    with CatalogReader(catalog) as reader:
        counts = Counter(reader.smaller_than_listed().values())
    return [f"{number:,} tensors are smaller in the files than listed here: {what}" for what, number in counts.items()]


def _quantization(catalog: Catalog, quantized: QuantizedTensors | None) -> dict[str, Any] | None:
    if quantized is None:
        return None
    codes, scales = ([catalog.tensors[name] for name in names] for names in (quantized.expressions, quantized.scales))
    return {
        "method": quantized.scheme.method,
        "weight_block_size": list(quantized.scheme.block),
        "power_of_two_scales": quantized.scheme.power_of_two,
        "codes": quantized.scheme.codes,
        "num_weights": len(codes),
        "weight_bytes": sum(entry.num_bytes for entry in codes),
        "scale_dtypes": sorted({entry.dtype for entry in scales}),
        "scale_bytes": sum(entry.num_bytes for entry in scales),
        "read_as": quantized.dtype,
        "problems": list(quantized.problems.values()),
    }


def _parts(info: ModelInfo, weights: Catalog, naming: Naming) -> tuple[str, ...]:
    blocks = get_family(info.family).blocks(info.args)
    sparse = Counter(block.feed_forward for block in blocks if isinstance(block.feed_forward, Experts))
    experts = [
        f"{layer.num} experts of {layer.hidden} ({layer.top_k} per token)"
        + (f", {layer.top_groups} of {layer.num_groups} groups" if layer.num_groups > 1 else "")
        + (f", a shared one of {layer.shared_hidden}" if layer.shared_hidden else "")
        + " in "
        + ("all layers" if number == len(blocks) else f"{number} of {len(blocks)} layers")
        for layer, number in sparse.items()
    ]
    additions = [
        f"latent attention ({latent.kv_rank} + {latent.rotary_dim} values per token)"
        for latent in dict.fromkeys(block.latent for block in blocks)
        if latent is not None
    ]
    if mtp := num_mtp_layers(weights.tensors, get_family(info.family), naming, info.args):
        additions.append(f"{mtp} layer{'s' if mtp > 1 else ''} for multi-token prediction")
    if multimodal := get_family(info.family).multimodal:
        beside = sum(is_named(name, multimodal.extras) for name in weights.tensors)
        additions += [f"{beside:,} tensors beside the text model"] if beside else []
    windows = Counter(b.attention.window for b in blocks if isinstance(b.attention, GroupedQuery))
    additions += [
        f"a window of {window:,} tokens in {number} of {len(blocks)} layers"
        for window, number in windows.items()
        if window is not None
    ]
    has_head_norms = get_family(info.family).has_role(Role.HEAD_NORM, info.args)
    features = {
        "q/k norms": has_head_norms,
        "attention sinks": get_family(info.family).has_role(Role.SINK, info.args),
        "attention biases": isinstance(info.args, DecoderArgs) and info.args.attention_bias,
        "mlp biases": isinstance(info.args, DecoderArgs) and info.args.mlp_bias,
    }
    return (*experts, *additions, *(part for part, is_there in features.items() if is_there))


def _naming_by_names(catalog: Catalog) -> str:
    """The naming, if names alone determine it. Native and Meta's differ only in the order of rows: unknown."""
    for family in all_families().values():
        with suppress(CheckpointError):
            if (name := naming_of(catalog, family).name) != "native":
                return name
    return "unknown"


def read_values(catalog: Catalog) -> dict[str, Any]:
    """Small plain values by name. Others (pickled objects) are shown as their size and never decoded."""
    values: dict[str, Any] = {}
    with CatalogReader(catalog) as reader:
        for name, value in catalog.values.items():
            if value.item is not None:
                values[name] = f"<{value.item.length:,} bytes>"
                if value.item.length > _SHOWN_ITEM_BYTES:
                    continue
            with suppress(CheckpointError):
                values[name] = reader.read_value(name)
    return values


def summarize_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with an optimizer's settings folded into one line each: parameters seldom differ in them."""
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


def _lines(catalog: Catalog, weights: Catalog) -> Iterator[TensorLine]:
    for name, entry in catalog.tensors.items():
        section = "model" if name in weights.tensors else catalog.section_of(name)
        yield TensorLine(name, section, entry.dtype, entry.shape, 1, len(entry.chunks), entry.num_bytes)


def _step(catalog: Catalog, values: Mapping[str, Any]) -> int | None:
    """The step of the checkpoint: a value, or a 0-dim tensor (torchtitan's), the only tensor that is read."""
    for name in _STEPS:
        if type(values.get(name)) is int:
            return int(values[name])
        entry = catalog.tensors.get(name)
        if entry is not None and not entry.shape and entry.dtype in ("int64", "int32"):
            with suppress(CheckpointError, UnsupportedError), CatalogReader(catalog) as reader:
                return int(reader.read(name, Box((), ())))
    return None
