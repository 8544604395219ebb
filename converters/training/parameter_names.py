"""The names of a training checkpoint's parameters, in the weights and in the optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from converters.common.box import Box, TensorInfo
from converters.common.errors import CheckpointError
from converters.engine.read import CatalogReader
from converters.families.args import is_tied
from converters.families.parameters import OUTPUT
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.naming.namings import detect_naming
from converters.naming.native_view import DEQUANTIZED, Reading, native_view
from converters.quantized.quantized_tensors import QuantizedTensors
from converters.source.model_from import find_model_info
from converters.source.weights import model_part, native_weights
from converters.store.location import Place
from converters.training.optimizer_state import STATE, ParameterNames
from converters.views.catalog import Catalog
from converters.views.expressions import Expression, Source
from converters.views.view import TIED_REASON, View


@dataclass(frozen=True, slots=True)
class Spelling:
    """The model, and its names in a checkpoint."""

    info: ModelInfo
    naming: str
    weights: Mapping[str, Expression]  # native name → how tensors make it; empty where the checkpoint holds none
    infos: Mapping[str, TensorInfo]  # of these weights
    dropped: Mapping[str, str]  # tensor among the weights → reason
    missing: tuple[str, ...]  # weights, if that is allowed
    names: ParameterNames
    quantized: QuantizedTensors | None = None  # the weights that are codes with scales


def read_spelling(
    catalog: Catalog,
    *,
    renamed: bool,
    model_from: Place | None = None,
    allow_missing: bool = False,
    dequantized: str = DEQUANTIZED,
) -> Spelling:
    """The names in a training checkpoint, from the optimizer if there are no weights.

    `renamed`: its sections had other names than titan's. `dequantized`: the type of weights that are codes. Raises
    CheckpointError with all weights that do not match.
    """
    if not model_part(catalog).tensors:
        return _from_optimizer(catalog, renamed=renamed, model_from=model_from)
    reading = Reading(allow_missing=allow_missing, keep_mtp=True, keep_extra=True, dequantized=dequantized)
    with native_weights(catalog, reading, model_from=model_from) as weights:
        view, info = weights.source, weights.info
    used = view.ledger.used
    tied = _second_names(view)
    names_read = [name for names in used.values() for name in names]
    nests = {name: ".".join(map(str, (*catalog.path_of(name)[:-1], ""))) for name in names_read}
    spelled: dict[str, str] = {}
    # The names of the weights; without the key of their dict; without the prefix `model.` of old versions of torchtitan
    prefixes: tuple[Callable[[str], str], ...]
    nest = f"{catalog.selected}." if catalog.selected else ""
    prefixes = (lambda name: "", lambda name: nest, lambda name: nests.get(name, ""), lambda name: "model.")
    for prefix_of in prefixes:
        for name in (*names_read, *tied):
            for text in (name, catalog.stored.get(name, name)):  # a group's list of parameters has wrapped names
                spelled.setdefault(text.removeprefix(prefix_of(name)), name)
    names = _names(info, view, spelled, is_native=not renamed and not catalog.prefixes)
    dropped, missing = view.ledger.dropped, tuple(view.ledger.missing)
    return Spelling(info, weights.naming, view.expressions, view.tensors, dropped, missing, names, weights.quantized)


def _from_optimizer(catalog: Catalog, *, renamed: bool, model_from: Place | None) -> Spelling:
    info = find_model_info(catalog, model_part(catalog), model_from=model_from)
    with CatalogReader(catalog) as reader:
        states = _States(reader)
        if not states.tensors:
            raise CheckpointError(
                f"{catalog.root}: holds neither weights nor an optimizer, so there is nothing to shard"
            )
        naming = detect_naming(states.tensors, get_family(info.family), where=str(catalog.place))
        some = Reading(allow_missing=True, allow_extra=True)
        view = native_view(states, info, naming, some, where=str(catalog.place))
    held = [name for names in view.ledger.used.values() for name in names]
    spelled = {name: name for name in (*held, *_second_names(view))}
    names = _names(info, view, spelled, is_native=not renamed and not catalog.prefixes)
    return Spelling(info, naming.name, {}, {}, {}, (), names)


class _States:
    """A TensorSource with the first parameter-shaped state of each parameter, under the parameter's name."""

    def __init__(self, reader: CatalogReader):
        self._reader = reader
        self._held: dict[str, str] = {}
        for name, info in reader.tensors.items():
            if name.startswith(STATE) and info.shape:
                self._held.setdefault(name.removeprefix(STATE).rpartition(".")[0], name)
        self.tensors: Mapping[str, TensorInfo] = {n: reader.tensors[held] for n, held in self._held.items()}

    def read(self, fqn: str, box: Box) -> np.ndarray:
        return self._reader.read(self._held[fqn], box)


def _second_names(view: View) -> list[str]:
    """The output of a tied model, where the checkpoint has it in addition to the embedding."""
    return [name for name, reason in view.ledger.dropped.items() if reason == TIED_REASON]


def _names(info: ModelInfo, view: View, spelled: Mapping[str, str], *, is_native: bool) -> ParameterNames:
    """`is_native`: whether the names are native where those of the weights are."""
    natives: dict[str, tuple[str, ...]] = {}
    for fqn, names in view.ledger.used.items():
        for name in names:
            natives[name] = (*natives.get(name, ()), fqn)
    natives |= dict.fromkeys(_second_names(view), (OUTPUT,))
    return ParameterNames(
        parameters=get_family(info.family).parameters(info.args),
        spelled=spelled,
        natives=natives,
        expressions=view.expressions,
        shapes={name: info.shape for name, info in view.source.tensors.items()},
        are_native=is_native and all(names == (fqn,) for fqn, names in view.ledger.used.items() if names),
        keep_places=all(
            isinstance(made, Source) and spelled.get(fqn) == made.sources[0]
            for fqn, made in view.expressions.items()
            if made.sources
        ),
        tied=is_tied(info.args),
    )
