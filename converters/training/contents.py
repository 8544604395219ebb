"""Plan the contents of a resharded checkpoint: names, the source of values, and keys in the state dict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from converters.catalog import Catalog
from converters.engine.read import CatalogReader
from converters.expressions import Source
from converters.families.base import Parameter
from converters.names import OPTIMIZER, SECTIONS, TRAIN_STATE
from converters.training.optimizer_state import WithNumbers, is_number, number_item, plan_optimizer
from converters.training.parameter_names import Spelling
from converters.training.sections import MODEL
from converters.view import Ledger, View


@dataclass(frozen=True, slots=True)
class ReshardedContents:
    """What is written: all names, and where their values come from."""

    source: View
    parameters: Sequence[Parameter]
    beside: Sequence[str]  # weights of a multimodal checkpoint beside its text model
    moments: Mapping[str, Sequence[str]]  # parameter → states of its shape
    blobs: Mapping[str, bytes]  # finished items
    paths: Mapping[str, tuple[Any, ...]]  # keys in the nested state dict
    dropped: Mapping[str, str]
    missing: tuple[str, ...]
    unknown: Sequence[str]


def collect(
    reader: CatalogReader, spelling: Spelling, sections: Mapping[str, str], *, allow_missing: bool
) -> ReshardedContents:
    """Plan all sections of `reader`. Raises CheckpointError where the optimizer does not match the model."""
    names = spelling.names
    optimizer = plan_optimizer(reader, names, allow_missing=allow_missing)
    has_weights = any(name in reader.tensors for made in spelling.weights.values() for name in made.sources)
    weights = spelling.weights if has_weights else {}
    made = {fqn: expression for fqn, expression in weights.items() if reader.tensors.keys() >= set(expression.sources)}
    infos, parameters = {fqn: spelling.infos[fqn] for fqn in made}, {p.fqn for p in names.parameters}
    made |= optimizer.tensors | {name: Source(name) for name in optimizer.numbers}
    source = WithNumbers(reader, optimizer.numbers)
    infos |= optimizer.infos | {name: source.tensors[name] for name in optimizer.numbers}
    copied, items = dict(optimizer.blobs), dict(optimizer.items)  # values: entries that are copied, and new items
    others = [n for n in (*reader.catalog.tensors, *reader.catalog.blobs) if sections[n] not in (MODEL, OPTIMIZER)]
    for name in others:
        if name in reader.catalog.blobs:
            copied[name] = name
        elif sections[name] == TRAIN_STATE and not names.are_native and is_number(reader.tensors[name]):
            items[name] = number_item(reader, name)  # the trainer's counters are plain numbers
        else:
            made[name], infos[name] = Source(name), reader.tensors[name]
    view = View(source, infos, made, Ledger({name: expression.sources for name, expression in made.items()}))
    read = cache(reader.read_blob)  # a group's settings go to each of its parameters
    paths = {n: _place(reader.catalog, n, spelling, sections) for n in (*made, *copied, *items)}
    return ReshardedContents(
        source=view,
        parameters=names.parameters,
        beside=[fqn for fqn in weights if fqn not in parameters],
        moments=optimizer.moments,
        blobs={name: read(held) for name, held in copied.items()} | items,
        paths=paths,
        dropped={**{n: why for n, why in spelling.dropped.items() if n in reader.tensors}, **optimizer.dropped},
        missing=(*spelling.missing, *(f"{OPTIMIZER} state of {fqn}" for fqn in optimizer.without_state)),
        unknown=[*optimizer.unknown, *(name for name in others if sections[name] not in SECTIONS)],
    )


def _place(catalog: Catalog, name: str, spelling: Spelling, sections: Mapping[str, str]) -> tuple[Any, ...]:
    """The keys of an entry in the nested state dict: unchanged, or the trainer's for translated entries."""
    if spelling.names.are_native or sections.get(name, MODEL) not in (MODEL, OPTIMIZER):
        return catalog.path_of(name)
    head, _, rest = name.partition(".")
    return (OPTIMIZER, rest) if head == OPTIMIZER else (name,)
