"""Plan the contents of a resharded checkpoint: names, the source of values, and keys in the state dict."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, list_offenders
from converters.common.fold import fold_texts
from converters.common.names import OPTIMIZER, SECTIONS, TRAIN_STATE
from converters.engine.read import CatalogReader
from converters.families.parameters import Parameter
from converters.source.models_inside import IN_OPTIMIZER
from converters.training.optimizer_state import (
    CopiedValue,
    MadeTensor,
    NewValue,
    Number,
    ParameterNames,
    WithNumbers,
    is_number,
    number_item,
    plan_optimizer,
)
from converters.training.parameter_names import Spelling
from converters.training.sections import MODEL
from converters.views.catalog import Catalog
from converters.views.expressions import Source
from converters.views.view import Ledger, View


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
    """Plan all sections of `reader`. Raises CheckpointError if the optimizer does not match the model."""
    names = spelling.names
    optimizer = plan_optimizer(reader, names, allow_missing=allow_missing)
    has_weights = any(name in reader.tensors for node in spelling.weights.values() for name in node.sources)
    weights = spelling.weights if has_weights else {}
    expressions = {
        fqn: expression for fqn, expression in weights.items() if reader.tensors.keys() >= set(expression.sources)
    }
    infos, parameters = {fqn: spelling.infos[fqn] for fqn in expressions}, {p.fqn for p in names.parameters}
    numbers = {name: entry.value for name, entry in optimizer.entries.items() if isinstance(entry, Number)}
    source = WithNumbers(reader, numbers)
    moments: dict[str, list[str]] = {}
    copied, items = dict[str, str](), dict[str, bytes]()  # values: entries that are copied, and new items
    for name, entry in optimizer.entries.items():
        match entry:
            case MadeTensor(expression, info, parameter):
                expressions[name], infos[name] = expression, info
                if parameter:
                    moments.setdefault(parameter, []).append(name)
            case CopiedValue(value):
                copied[name] = value
            case NewValue(item):
                items[name] = item
    expressions |= {name: Source(name) for name in numbers}
    infos |= {name: source.tensors[name] for name in numbers}
    rest = [n for n in reader.catalog.names if sections[n] not in (MODEL, OPTIMIZER)]
    for name in rest:
        if name in reader.catalog.values:
            copied[name] = name
        elif sections[name] == TRAIN_STATE and not names.are_native and is_number(reader.tensors[name]):
            items[name] = number_item(reader, name)  # the trainer's counters are plain numbers
        else:
            expressions[name], infos[name] = Source(name), reader.tensors[name]
    _refuse_left_behind(reader, names, [*optimizer.unknown, *rest], sections)
    view = View(
        source, infos, expressions, Ledger({name: expression.sources for name, expression in expressions.items()})
    )
    read = cache(reader.read_blob)  # a group's settings go to each of its parameters
    paths = {n: _place(reader.catalog, n, spelling, sections) for n in (*expressions, *copied, *items)}
    return ReshardedContents(
        source=view,
        parameters=names.parameters,
        beside=[fqn for fqn in weights if fqn not in parameters],
        moments=moments,
        blobs={name: read(value) for name, value in copied.items()} | items,
        paths=paths,
        dropped={**{n: why for n, why in spelling.dropped.items() if n in reader.tensors}, **optimizer.dropped},
        missing=(*spelling.missing, *(f"{OPTIMIZER} state of {fqn}" for fqn in optimizer.without_state)),
        unknown=[*optimizer.unknown, *(name for name in rest if sections[name] not in SECTIONS)],
    )


def _refuse_left_behind(
    reader: CatalogReader, names: ParameterNames, others: Sequence[str], sections: Mapping[str, str]
) -> None:
    """Raise CheckpointError if entries that would be copied follow parameters that get other names or rows."""
    if names.keep_places:
        return
    shapes = {shape for shape in names.shapes.values() if len(shape) > 1}
    num_weights = sum(map(prod, names.shapes.values()))
    left = [name for name in others if _follows_parameters(reader, names, shapes, num_weights, name)]
    if left:
        found = dict.fromkeys(sections[name] for name in left)
        raise CheckpointError(
            f"{reader.catalog.root}: the weights get titan's names and order of rows, and entries of these sections, "
            f"which are of the same parameters, would keep their own:{list_offenders(fold_texts(left))}",
            hint="their kind is unknown, so that they cannot be translated; nothing was written",
            tries=[f"--drop {','.join(found)}"],
        )


def _follows_parameters(
    reader: CatalogReader, names: ParameterNames, shapes: Collection[tuple[int, ...]], num_weights: int, name: str
) -> bool:
    """Whether an entry of an unknown kind is as weights are.

    It has the name or shape of one, the numbers of all in one row, or is an optimizer's, but for numbers.
    """
    is_of_optimizer = IN_OPTIMIZER.search(name) is not None
    if name in reader.catalog.values:
        return is_of_optimizer and not _is_plain(reader, name)
    info, keys = reader.tensors[name], name.split(".")
    if is_of_optimizer and info.shape:
        return True
    if DTYPES[info.dtype].is_floating and (info.shape in shapes or prod(info.shape) >= num_weights):
        return True
    spans = ((start, end) for start in range(len(keys)) for end in range(start + 1, len(keys) + 1))
    return bool(info.shape) and any(".".join(keys[start:end]) in names.spelled for start, end in spans)


def _is_plain(reader: CatalogReader, name: str) -> bool:
    try:
        reader.read_value(name)
    except CheckpointError:
        return False
    return True


def _place(catalog: Catalog, name: str, spelling: Spelling, sections: Mapping[str, str]) -> tuple[Any, ...]:
    """The keys of an entry in the nested state dict: unchanged, or the trainer's for translated entries."""
    if spelling.names.are_native or sections.get(name, MODEL) not in (MODEL, OPTIMIZER):
        return catalog.path_of(name)
    head, _, rest = name.partition(".")
    return (OPTIMIZER, rest) if head == OPTIMIZER else (name,)
