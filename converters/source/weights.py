"""Open the weights of a checkpoint of any format under native names, for conversion, trainer and inference."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from converters.common.box import Box, TensorInfo, row_blocks
from converters.common.collector import collector_paused
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.common.fold import fold_texts
from converters.common.names import HF_CONFIG, section_of
from converters.containers.registry import CONTAINERS
from converters.engine.read import CatalogReader
from converters.families.args import ModelArgs, num_layers
from converters.families.base import Family, Naming
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo, find_model_file
from converters.model.mtp import num_mtp_layers, require_stated, with_mtp, without_mtp
from converters.model.multimodal import unread_remark
from converters.naming.namings import detect_naming
from converters.naming.native_view import DEQUANTIZED, READING, Reading, native_view
from converters.quantized.quantized_tensors import QuantizedTensors, find_quantized
from converters.source.model_from import find_model_info, has_all_fields
from converters.source.models_inside import IN_OPTIMIZER, is_of
from converters.source.open import open_checkpoint
from converters.store.location import Place
from converters.views.catalog import Catalog
from converters.views.compare import BLOCK_BYTES
from converters.views.view import View


def dequantized_for(dtype: str | None) -> str:
    """The type of weights that are read from codes: one that a cast to `dtype` rounds at most once."""
    return DEQUANTIZED if dtype in (None, "bf16", DEQUANTIZED) else "float32"


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """The weights of a checkpoint under native names. A context manager, which closes the files."""

    source: View  # a TensorSource
    info: ModelInfo
    catalog: Catalog  # the whole checkpoint, sections such as the optimizer included
    naming: str  # of the checkpoint
    left_out: Mapping[str, int]  # entries that are not weights: section or key → number
    reader: CatalogReader
    quantized: QuantizedTensors | None = None  # if weights are stored as codes with scales
    num_mtp_layers: int = 0  # of the checkpoint, also if they are not among the weights
    extras: tuple[str, ...] = ()  # of the weights: those beside the text model of a multimodal checkpoint
    other_readers: tuple[CatalogReader, ...] = ()  # of another checkpoint that completes it

    @property
    def notes(self) -> list[str]:
        """On files and tensors that are not read, and on codes."""
        mtp = f"layers for multi-token prediction are not read: {self.num_mtp_layers}"
        sizes = {} if CONTAINERS[self.catalog.container].has_parts_of_ranks else self.catalog.tensors
        media = unread_remark(self.source.ledger.dropped, sizes)
        unread = [*([mtp] if self.num_mtp_layers else []), *([media] if media else [])]
        return [*self.catalog.notes, *unread, *self.notes_on_codes]

    @property
    def notes_on_codes(self) -> list[str]:
        """On weights of a quantized checkpoint that are not, and on float8 weights without scales."""
        if self.quantized is None:
            num_bare = sum(info.dtype.startswith("float8") for info in self.tensors.values())
            text = f"weights in float8 without scales: {num_bare:,}; their codes are taken as values"
            return [text] if num_bare else []
        scheme, used = self.quantized.scheme, self.source.ledger.used
        covered = (p.fqn for p in get_family(self.info.family).parameters(self.info.args) if scheme.covers(p))
        names = [
            name
            for fqn in covered
            for name in used.get(fqn, ())
            if not (name in self.quantized.expressions or name in self.quantized.scales)
            and not scheme.is_listed(name.rpartition(".")[0])
        ]
        text = f"not quantized, although {HF_CONFIG} does not list their modules: {', '.join(fold_texts(names))}"
        return [text] if names else []

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every weight by native name, in model order."""
        return self.source.tensors

    def read(self, fqn: str, box: Box | None = None) -> np.ndarray[Any, Any]:
        """The values of a weight, or of a box of it, in its own dtype (see converters.common.dtypes for bfloat16)."""
        return self.source.read(fqn, box or Box.whole(self.tensors[fqn].shape))

    def __enter__(self) -> "NativeWeights":
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        self.reader.__exit__(kind, *rest)


def open_native(
    path: Place,
    *,
    select: str | None = None,
    model_from: Place | None = None,
    otherwise: ModelInfo | None = None,
    dequantized: str = DEQUANTIZED,
) -> NativeWeights:
    """Open a checkpoint of any format. Reads headers, and tensors that are stored twice: a tied output, Meta's norms.

    `select`: the model, if the checkpoint holds several.
    `model_from`: a folder whose titan_model.json, config.json or params.json describes the model, for checkpoints that
    do not (torchtitan's); `otherwise`: the model, if the caller knows it. `dequantized`: bfloat16 or float32, the type
    of weights that are stored as codes with scales; to read those that are NaN raises CheckpointError. Layers for
    multi-token prediction are left out. Raises CheckpointError with everything that does not match the model, and
    ConfigError if `model_from` contradicts the checkpoint.
    """
    catalog = open_checkpoint(path, select=select)
    weights = native_weights(catalog, Reading(dequantized=dequantized), model_from=model_from, otherwise=otherwise)
    codes = weights.quantized.expressions.keys() if weights.quantized else set()
    quantized = (fqn for fqn, names in weights.source.ledger.used.items() if not codes.isdisjoint(names))
    return replace(weights, source=replace(weights.source, finite=frozenset(quantized)))


@collector_paused()
def native_weights(
    catalog: Catalog,
    reading: Reading = READING,
    *,
    model_from: Place | None = None,
    otherwise: ModelInfo | None = None,
) -> NativeWeights:
    """`open_native` for an open catalog. Tensors that may be missing or extra are in the ledger of `source`."""
    weights = model_part(catalog)
    if all(IN_OPTIMIZER.match(name) for name in catalog.tensors):
        raise CheckpointError(
            f"{catalog.place}: the state of an optimizer, without weights",
            hint="the weights are in another folder, often beside it; `titan reshard` takes an optimizer alone",
        )
    info = find_model_info(catalog, weights, model_from=model_from, otherwise=otherwise)
    if num_layers(info.args) > len(weights.tensors):  # checked before names are made for billions of layers
        raise CheckpointError(
            f"{catalog.place}: {len(weights.tensors):,} tensors are too few for the {num_layers(info.args):,} layers "
            f"of the model in {model_from or catalog.location}"
        )
    family = get_family(info.family)
    naming = naming_of(catalog, family, info.args)
    num_mtp = num_mtp_layers(weights.tensors, family, naming, info.args)
    if num_mtp and not reading.keep_mtp:
        naming = without_mtp(family, naming, info.args, num_mtp)
    if reading.keep_mtp and not reading.allow_missing:
        require_stated(num_mtp, info.stated_mtp_layers, where=str(catalog.place))
    info = replace(info, args=with_mtp(info.args, num_mtp if reading.keep_mtp else 0))
    if reading.keep_extra is None:
        reading = replace(reading, keep_extra=bool(info.outer) and naming.name == "native")
    reader = CatalogReader(weights)
    try:
        if reading.reads_copies:
            require_equal_copies(reader)
        quantized = quantized_tensors(catalog, info, dtype=reading.dequantized)
        view = native_view(reader, info, naming, reading, quantized=quantized, where=str(catalog.place))
        parameters = {p.fqn for p in family.parameters(info.args)}
        extras = tuple(name for name in view.tensors if name not in parameters)
        if not extras:
            info = without_outer(info, family)
        return NativeWeights(view, info, catalog, naming.name, left_out(catalog), reader, quantized, num_mtp, extras)
    except BaseException:
        reader.__exit__(None, None, None)
        raise


def without_outer(info: ModelInfo, family: Family) -> ModelInfo:
    """Without the files and fields of config.json that a multimodal class has beside its text model."""
    multimodal = family.multimodal
    if multimodal is None:
        return info
    assets = {name: path for name, path in info.assets.items() if name not in multimodal.files}
    return replace(info, outer={}, assets=assets)


def quantized_tensors(catalog: Catalog, info: ModelInfo, *, dtype: str = DEQUANTIZED) -> QuantizedTensors | None:
    """The weights of a checkpoint that are stored as codes with scales; None if `info` says of none."""
    if info.quantization is None:
        return None
    infos = {name: TensorInfo(entry.dtype, entry.shape) for name, entry in model_part(catalog).tensors.items()}
    file = find_model_file(catalog.root)
    is_own = CONTAINERS[catalog.container].is_for_transformers and file is not None and has_all_fields(file)
    return find_quantized(infos, info.quantization, dtype=dtype, is_own=is_own)


def naming_of(catalog: Catalog, family: Family, args: ModelArgs | None = None) -> Naming:
    """The naming of a checkpoint's weights, including the dict that holds them; by their names alone without `args`."""
    nest = catalog.selected
    if nest is None:
        nest = ".".join(map(str, _nest(catalog) or ()))
    tensors = model_part(catalog).tensors
    naming = detect_naming(tensors, family, nest=f"{nest}." if nest else "", where=str(catalog.place))
    if args is None:
        return naming
    infos = {name: TensorInfo(entry.dtype, entry.shape) for name, entry in tensors.items()}
    try:
        return family.naming_by_shapes(naming, args, infos)
    except CheckpointError as error:
        raise CheckpointError(f"{catalog.place}: {error.message}", hint=error.hint) from None


def model_part(catalog: Catalog) -> Catalog:
    """Only the weights of a training checkpoint, under unchanged names."""
    tensors = {n: t for n, t in catalog.tensors.items() if not _is_other_section(catalog, n)}
    nest = _nest(catalog)
    if catalog.selected is not None:
        tensors = {n: t for n, t in tensors.items() if is_of(n, catalog.selected, catalog.other_models)}
    elif nest is not None:
        tensors = {n: t for n, t in tensors.items() if catalog.path_of(n)[:-1] == nest}
    return replace(catalog, tensors=tensors, values={})


def left_out(catalog: Catalog) -> dict[str, int]:
    """The entries that are not weights: section, or top key of a nested state dict → number of entries."""
    weights = model_part(catalog).tensors
    others = (n for n in catalog.names if n not in weights)
    return dict(Counter(map(catalog.section_of, others)))


# The keys of the weights in dicts that hold the optimizer, too
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")


def _nest(catalog: Catalog) -> tuple[Any, ...] | None:
    """The path of the dict that holds the weights; () for the root, None if no one dict does (nested modules)."""
    if not CONTAINERS[catalog.container].keeps_sections:
        return None
    sizes = Counter(catalog.path_of(n)[:-1] for n in catalog.tensors if not _is_other_section(catalog, n))
    total = sum(sizes.values())
    likely = [p for p, size in sizes.items() if (not p or p[-1] in _MODEL_KEYS) and 10 * size >= total]
    if not likely:
        return next(iter(sizes)) if len(sizes) == 1 else None
    return max(likely, key=lambda path: (sizes[path], -len(path)))


def _is_other_section(catalog: Catalog, name: str) -> bool:
    """Whether a tensor belongs to a section such as the optimizer, by its name in a flattened state dict."""
    return CONTAINERS[catalog.container].keeps_sections and section_of(name) != "model"


def require_equal_copies(reader: CatalogReader) -> None:
    """Raise CheckpointError with every copy whose bits are not those of its tensor. Reads both, block by block."""
    problems = []
    for fqn, copies in reader.catalog.copies.items():
        entry = reader.catalog.tensors[fqn]
        for chunk in copies:
            alone = Catalog(reader.catalog.store, reader.catalog.container, {fqn: replace(entry, chunks=(chunk,))})
            with CatalogReader(alone) as copy:
                blocks = row_blocks(chunk.box, itemsize(entry.dtype), BLOCK_BYTES)
                if any(reader.read(fqn, box).tobytes() != copy.read(fqn, box).tobytes() for box in blocks):
                    problems.append(f"{fqn}: {chunk.file}")
    if problems:
        raise CheckpointError(
            f"{reader.catalog.location}: shards differ in tensors that must be equal in all of them:"
            + list_offenders(problems),
            hint="each is compared with the first shard that has it; one is damaged, or of another model",
        )
