"""Find the models that a checkpoint holds, and the one that `--select` names: of several none is taken unasked."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from converters.catalog import Catalog
from converters.containers.registry import CONTAINERS
from converters.errors import ConfigError, UnsupportedError, list_offenders
from converters.families.base import EMBEDDING, OUTPUT
from converters.families.registry import all_families
from converters.names import section_of
from converters.namings import any_name, readable_namings
from converters.sizes import format_bytes

ROOT = "."  # the name of a model whose tensors are not in a dict of their own, beside one that is
# Of states that have their parameters' names: moments, an optimizer's own copies of the weights
IN_OPTIMIZER = re.compile(r"(^|\.)opt(im|imizer|_state)?s?(?![a-z])")
_NUMBER = re.compile(r"\b(layers|block|experts)\.\d+(?=\.)")
_FEWEST_NAMES = 8  # that two dicts must have in common, if no family has these names


class SeveralModels(UnsupportedError):
    """A checkpoint holds several models, and nothing says which one is meant."""


def choose_model(catalog: Catalog, select: str | None, *, otherwise: str | None = None) -> Catalog:
    """`catalog` with `selected`, the place of one of its models, where it holds several.

    `select`: the place of the model or its beginning: `policy` for `policy.model`; `otherwise` where it is None and
    there are several. Raises SeveralModels with the places of all where both are None, and ConfigError where
    `select` does not name one.
    """
    places = _find_places(catalog)
    if len(places) > 1:
        select = select or otherwise
    if select is None and len(places) > 1:
        shown = [_describe(catalog, place, _inside(catalog, place, places)) for place in places]
        raise SeveralModels(
            f"{catalog.place} holds {len(places)} models:{list_offenders(shown)}",
            hint="only you know which one is meant; `titan train` takes it as checkpoint.initial_load_select",
            tries=[f"--select {place or ROOT}" for place in places],
        )
    if select is None or (select == ROOT and not places):
        return catalog
    asked = "" if select == ROOT else select
    named = [place for place in places if place == asked] or [
        p for p in places if asked and f"{p}.".startswith(f"{asked}.")
    ]
    if len(named) != 1:
        what = "is no model" if not named else "is the beginning of several models"
        known = ", ".join(place or ROOT for place in (named or places)) or "none"
        raise ConfigError(
            f"--select {select}: {what} of {catalog.place}",
            hint=f"its models: {known}" if len(places) != 1 else f"it holds one model, {known}: leave --select out",
        )
    if len(places) == 1:
        return catalog
    return replace(catalog, selected=named[0], other_models=tuple(p for p in places if p != named[0]))


def is_inside(name: str, place: str) -> bool:
    """Whether an entry is below `place` in the state dict."""
    return not place or name.startswith(f"{place}.")


def is_of(name: str, place: str, others: Iterable[str]) -> bool:
    """Whether an entry is of the model at `place`, and not of one of `others` inside of it."""
    return is_inside(name, place) and not any(is_inside(name, o) for o in others if o != place and is_inside(o, place))


def _inside(catalog: Catalog, place: str, places: Iterable[str]) -> list[str]:
    return [n for n in catalog.tensors if section_of(n) == "model" and is_of(n, place, places)]


def _describe(catalog: Catalog, place: str, names: Sequence[str]) -> str:
    entries = [catalog.tensors[name] for name in names]
    dtypes = ", ".join(dtype for dtype, _ in Counter(entry.dtype for entry in entries).most_common())
    number, size = sum(prod(entry.shape) for entry in entries), sum(entry.num_bytes for entry in entries)
    return f"{place or ROOT}: {len(names):,} tensors, {number:,} parameters, {format_bytes(size)} of {dtypes}"


def _find_places(catalog: Catalog) -> list[str]:
    """The places of all models, in the order of the checkpoint: keys in the state dict joined by dots, "" for the root.

    A model of a known family has layers and an embedding or output: an encoder of images beside a text model has not.
    """
    if catalog.container == "meta":
        return []
    known = _KnownNames()
    layers: dict[str, None] = {}
    ends: set[str] = set()
    places: dict[str, tuple[str, bool] | None] = {}  # of a name without numbers
    for name in catalog.tensors:
        if section_of(name) != "model" or IN_OPTIMIZER.search(name):
            continue
        alike = _NUMBER.sub(r"\1.0", name)
        if alike not in places:
            places[alike] = _place_of(alike, known)
        if found := places[alike]:
            place, is_end = found
            if is_end:
                ends.add(place)
            else:
                layers.setdefault(place)
    return [place for place in layers if place in ends] or _alike_dicts(catalog)


def _place_of(name: str, known: "_KnownNames") -> tuple[str, bool] | None:
    """What is in front of a model's own name for a tensor; whether it is an embedding or output. None: neither kind."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        rest = ".".join(parts[depth:])
        if part in known.heads and (rest in known.ends or any(p.fullmatch(rest) for p in known.patterns)):
            if rest not in known.ends and ".0." not in rest:
                return None
            return ".".join(parts[:depth]), rest in known.ends
    return None


class _KnownNames:
    """The tensors' names in all namings of all families."""

    def __init__(self) -> None:
        namings = [naming for family in all_families().values() for naming in readable_namings(family)]
        rules = [rule for naming in namings for rule in naming.rules if rule.foreign]
        self.heads = {rule.foreign.split(".")[0] for rule in rules}
        self.ends = {rule.foreign for rule in rules if rule.native in (EMBEDDING, OUTPUT)}
        self.patterns = list(dict.fromkeys(map(any_name, namings)))


def _alike_dicts(catalog: Catalog) -> list[str]:
    """Dicts of tensors with the same names, where no family has these names."""
    if not CONTAINERS[catalog.container].keeps_sections:
        return []
    dicts: dict[str, set[str]] = {}
    for name in catalog.tensors:
        if section_of(name) == "model" and not IN_OPTIMIZER.search(name):
            *keys, last = map(str, catalog.path_of(name))
            dicts.setdefault(".".join(keys), set()).add(last)
    alike: dict[frozenset[str], list[str]] = {}
    for place, names in dicts.items():
        if len(names) >= _FEWEST_NAMES:
            alike.setdefault(frozenset(names), []).append(place)
    found = max(alike.values(), key=len, default=[])
    return found if len({re.sub(r"\d+", "0", place) for place in found}) > 1 else []
