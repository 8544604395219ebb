"""Find the models that a checkpoint holds, and the one that `--select` names: of several none is taken unasked."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from converters.common.errors import ConfigError, UnsupportedError, list_offenders
from converters.common.names import section_of
from converters.common.sizes import format_bytes
from converters.containers.registry import CONTAINERS
from converters.families.parameters import EMBEDDING, OUTPUT
from converters.families.registry import all_families
from converters.naming.namings import any_name, readable_namings
from converters.store.location import Location
from converters.views.catalog import Catalog

ROOT = "."  # the name of a model whose tensors are not in a dict of their own, beside one that is
# Of states that have their parameters' names: moments, an optimizer's own copies of the weights
IN_OPTIMIZER = re.compile(r"(^|\.)opt(im|imizer|_state)?s?(?![a-z])")
_NUMBER = re.compile(r"\b(layers|block|experts)\.\d+(?=\.)")
# Names of models that no optimizer trains: averages, and copies of what another model was
_UNTRAINED = re.compile(
    r"(?<![a-z])(average|averaged|avg|ema|frozen|initial|old|ref|reference|shadow|swa|target|teacher)(?![a-z])", re.I
)
_GENERIC = frozenset(("model", "module", "state_dict", "model_state_dict"))  # keys that name no model of several
_FEWEST_NAMES = 8  # that two dicts must have in common, if no family has these names


class SeveralModels(UnsupportedError):
    """A checkpoint holds several models, and nothing says which one is meant."""

    def __init__(self, place: Location, models: Mapping[str, str], *, option: str = "--select "):
        """`models`: place → its description; `option`: what a model's place is added to, to select it."""
        super().__init__(
            f"{place} holds {len(models)} models:{list_offenders([f'{m or ROOT}: {d}' for m, d in models.items()])}",
            hint="only you know which one is meant",
            tries=[f"{option}{model or ROOT}" for model in models],
        )
        self.place, self.models = place, models


def choose_model(catalog: Catalog, select: str | None, *, otherwise: str | None = None) -> Catalog:
    """`catalog` with `selected`, the place of one of its models, if it holds several.

    `select`: the place of the model or its beginning: `policy` for `policy.model`; `otherwise` if it is None and
    there are several. Raises SeveralModels with the places of all if both are None, and ConfigError if
    `select` does not name one.
    """
    places = _find_places(catalog)
    if len(places) > 1:
        places = [_own_dict(catalog, place, _inside(catalog, place, places)) for place in places]
        select = select or otherwise
    if select is None and len(places) > 1:
        raise SeveralModels(catalog.place, {m: _describe(catalog, _inside(catalog, m, places)) for m in places})
    if select is None or (select == ROOT and not places):
        return catalog
    wanted = "" if select == ROOT else select
    named = [place for place in places if place == wanted] or [
        p for p in places if wanted and f"{p}.".startswith(f"{wanted}.")
    ]
    if len(named) != 1:
        what = "is no model" if not named else "is the beginning of several models"
        listing = ", ".join(place or ROOT for place in (named or places)) or "none"
        raise ConfigError(
            f"{select} {what} of {catalog.place}",
            hint=f"its models: {listing}"
            if len(places) != 1
            else f"it holds one model, {listing}, so none need be selected",
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


def find_owners(optimizer: str, models: Sequence[str]) -> list[str]:
    """The models, of several, that the optimizer at a place may belong to: all that nothing excludes.

    It is that of the models whose name is in its keys (`optimizers.actor`, `optimizer_actor`), else of those in the
    innermost dict around it that has any; and of those, of the ones that are trained by their names, if there are any.
    """
    keys = optimizer.split(".")
    names = {re.sub(r"^_", "", IN_OPTIMIZER.sub("", key)) for key in keys}
    keys_of = {m: {key for key in m.split(".") if key and not key.isdecimal()} - _GENERIC for m in models}
    owners = [model for model in models if keys_of[model] & names]
    if not owners or len(owners) == len(models):
        place = dict_around(optimizer, models)
        owners = [place] if place in models else [model for model in models if is_inside(model, place)]
    trained = [model for model in owners if not _UNTRAINED.search(model)]
    return trained or owners


def dict_around(optimizer: str, models: Iterable[str]) -> str:
    """The innermost dict around an optimizer that is a model or holds one; "" is the root."""
    place = optimizer
    while place := place.rpartition(".")[0]:
        if any(model == place or is_inside(model, place) for model in models):
            break
    return place


def _inside(catalog: Catalog, place: str, places: Iterable[str]) -> list[str]:
    return [n for n in catalog.tensors if section_of(n) == "model" and is_of(n, place, places)]


def _own_dict(catalog: Catalog, place: str, names: Iterable[str]) -> str:
    """`place`, or its key `model` if that holds all its tensors: torchtitan once began names with `model.`."""
    depth = len(place.split(".")) if place else 0
    paths = [tuple(map(str, catalog.path_of(name))) for name in names]
    is_below = all(len(path) > depth + 1 and path[depth] == "model" for path in paths)
    is_at = all(".".join(path[:depth]) == place for path in paths)
    return f"{place}.model".lstrip(".") if is_below and is_at else place


def _describe(catalog: Catalog, names: Sequence[str]) -> str:
    entries = [catalog.tensors[name] for name in names]
    dtypes = ", ".join(dtype for dtype, _ in Counter(entry.dtype for entry in entries).most_common())
    number, size = sum(prod(entry.shape) for entry in entries), sum(entry.num_bytes for entry in entries)
    return f"{len(names):,} tensors, {number:,} parameters, {format_bytes(size)} of {dtypes}"


def _find_places(catalog: Catalog) -> list[str]:
    """The places of all models, in the order of the checkpoint: keys in the state dict joined by dots, "" for the root.

    A model of a known family has layers and an embedding or output: an encoder of images beside a text model has not.
    """
    if CONTAINERS[catalog.container].has_parts_of_ranks:
        return []
    names = _KnownNames()
    layers: dict[str, None] = {}
    ends: set[str] = set()
    places: dict[str, tuple[str, bool] | None] = {}  # of a name without numbers
    for name in catalog.tensors:
        if section_of(name) != "model" or IN_OPTIMIZER.search(name):
            continue
        alike = _NUMBER.sub(r"\1.0", name)
        if alike not in places:
            places[alike] = _place_of(alike, names)
        if match := places[alike]:
            place, is_end = match
            if is_end:
                ends.add(place)
            else:
                layers.setdefault(place)
    return [place for place in layers if place in ends] or _alike_dicts(catalog)


def _place_of(name: str, known: "_KnownNames") -> tuple[str, bool] | None:
    """The prefix of a model's own name for a tensor; whether it is an embedding or output. None: neither kind."""
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
    """Dicts of tensors with the same names, if no family has these names."""
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
    largest = max(alike.values(), key=len, default=[])
    return largest if len({re.sub(r"\d+", "0", place) for place in largest}) > 1 else []
