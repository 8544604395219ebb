"""The door to weights: any format in, native names out. Trainer, inference and conversion open checkpoints here."""

from dataclasses import dataclass, replace
from pathlib import Path

from converters.catalog import Catalog
from converters.copies import require_equal_copies
from converters.errors import CheckpointError
from converters.families.registry import get_family
from converters.model_info import ModelInfo, read_model_info, says_model
from converters.names import section_of
from converters.open import open_checkpoint
from converters.read import CatalogReader
from converters.view import View, detect_naming, native_view


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """The weights of a checkpoint under native names. A context manager: it holds files open while it is read from."""

    source: View  # a TensorSource
    info: ModelInfo
    catalog: Catalog  # the whole checkpoint, sections such as the optimizer included
    naming: str  # how the checkpoint spells its weights
    reader: CatalogReader

    def __enter__(self) -> "NativeWeights":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.reader.__exit__(*exc_info)


def open_native(
    path: Path | str, *, model_from: Path | str | None = None, otherwise: ModelInfo | None = None
) -> NativeWeights:
    """Open a checkpoint of any format. Reads headers, and what is stored twice: a tied model's output, Meta's norms.

    `model_from`: a folder whose titan_model.json, config.json or params.json says what the model is, for checkpoints
    that do not say it (torchtitan's); `otherwise`: what it is then, for a caller who knows. Raises CheckpointError with
    everything that does not match the model.
    """
    return native_weights(open_checkpoint(path), model_from=model_from, otherwise=otherwise)


def native_weights(
    catalog: Catalog, *, model_from: Path | str | None = None, otherwise: ModelInfo | None = None
) -> NativeWeights:
    """open_native for a catalog that is open already."""
    weights = model_part(catalog)
    place = Path(model_from) if model_from else catalog.root
    info = otherwise if otherwise and not says_model(place) else read_model_info(place, weights)
    if info.args.num_layers > len(weights.tensors):  # told before a name is made for each of billions of layers
        raise CheckpointError(
            f"{catalog.root}: {len(weights.tensors):,} tensors cannot be the {info.args.num_layers:,} layers "
            f"that {place} says the model has"
        )
    naming = detect_naming(weights.tensors, get_family(info.family), where=str(catalog.root))
    reader = CatalogReader(weights)
    try:
        require_equal_copies(reader)
        view = native_view(reader, info, naming, where=str(catalog.root))
        return NativeWeights(view, info, catalog, naming.name, reader)
    except BaseException:
        reader.__exit__(None, None, None)
        raise


def model_part(catalog: Catalog) -> Catalog:
    """The weights of a training checkpoint without its other sections; other containers hold nothing else."""
    if catalog.container != "dcp":
        return catalog
    return replace(catalog, tensors={n: t for n, t in catalog.tensors.items() if section_of(n) == "model"}, blobs={})
