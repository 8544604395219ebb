"""Remove the prefixes that wrappers add to the names of parameters: DDP, FSDP, torch.compile, Lightning."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.common.names import section_of
from converters.families.registry import all_families
from converters.naming.namings import count_named
from converters.views.catalog import Catalog

# Of torch's wrappers, anywhere in a name: no parameter of a model has such a part
_INNER = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Attributes that hold the model are prefixes of every name: `module.` (DDP), `model.` or any other (Lightning)
_MOST_OUTER = 4
_NUMBER = re.compile(r"(?<=\blayers)\.\d+(?=\.)")


def unwrap_modules(catalog: Catalog) -> Catalog:
    """`catalog` without the names that torch's wrappers have anywhere. `prefixes` counts the removed ones.

    Raises CheckpointError if two entries would have one name.
    """
    if flat := [name for name in catalog.tensors if name.endswith("_flat_param")]:
        raise UnsupportedError(
            f"{catalog.place}: FSDP's flattened parameters, which only the same wrapping can split:"
            + list_offenders(flat),
            hint="save with StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT instead of LOCAL_STATE_DICT",
        )
    for text in _INNER:
        if any(text in name for name in catalog.tensors):
            catalog = _renamed(catalog, f"{text}.", partial(_without, text))
    return catalog


def unwrap_outer(catalog: Catalog) -> Catalog:
    """`catalog` without the attributes that hold its model, which are prefixes of all names.

    One is removed only if the names then are those of a known model and were not before. Raises CheckpointError
    if two entries would have one name.
    """
    for _ in range(_MOST_OUTER):
        if not (prefix := _outer_prefix(catalog)):
            break
        in_optimizer = re.compile(rf"((?:^|\.)(?:state|param_groups)\.){re.escape(prefix)}")

        def strip(
            key: str, before: Sequence[Any], prefix: str = prefix, pattern: re.Pattern[str] = in_optimizer
        ) -> str:
            is_weight = not before or section_of(str(before[0])) == "model" or before[-1] in ("state", "param_groups")
            return pattern.sub(r"\1", key.removeprefix(prefix) if is_weight else key)

        catalog = _renamed(catalog, prefix, strip)
    return catalog


def _without(text: str, key: str, before: Sequence[Any]) -> str:
    return ".".join(part for part in key.split(".") if part != text)


def _outer_prefix(catalog: Catalog) -> str:
    """The prefix without which more of the weights' names are those of a model; "" for none."""
    names = [str(catalog.path_of(name)[-1]) for name in catalog.tensors if section_of(name) == "model"]
    alike = Counter(_NUMBER.sub(".0", name) for name in names)  # each name once for all layers
    most, prefix = max(_num_known(alike), 1), ""
    for _ in range(_MOST_OUTER if most < len(names) else 0):
        heads: Counter[str] = Counter()
        for name, number in alike.items():
            head, dot, _rest = name.removeprefix(prefix).partition(".")
            heads[head] += number if dot and name.startswith(prefix) else 0
        if not heads.total():
            break
        prefix += heads.most_common(1)[0][0] + "."
        if _num_known({name.removeprefix(prefix): number for name, number in alike.items()}) > most:
            return prefix
    return ""


def _num_known(alike: Mapping[str, int]) -> int:
    """Number of tensors with names of the best matching family; `alike`: name → number of tensors."""
    return max(count_named(alike, family) for family in all_families().values())


def _renamed(catalog: Catalog, removed: str, rename: Callable[[str, Sequence[Any]], str]) -> Catalog:
    """`rename`: a key of the nested state dict, and the keys before it → the new key; "" for none."""
    old_names = catalog.names
    paths = {name: _renamed_path(catalog.path_of(name), rename) for name in old_names}
    new = {name: ".".join(map(str, path)) for name, path in paths.items()}
    clashes = [name for name, count in Counter(new.values()).items() if count > 1]
    if clashes:
        odd = [" and ".join(old for old, name in new.items() if name == clash) for clash in clashes[:20]]
        raise CheckpointError(
            f"{catalog.place}: two entries have one name once `{removed}` is removed:{list_offenders(odd)}",
            hint="save the model and its wrapped copy in separate files",
        )
    number = sum(new[name] != ".".join(map(str, catalog.path_of(name))) for name in catalog.tensors)
    return replace(
        catalog,
        tensors={new[n]: replace(t, fqn=new[n]) for n, t in catalog.tensors.items()},
        values={new[n]: value for n, value in catalog.values.items()},
        planner_data={new[n]: paths[n] for n in old_names if n in catalog.planner_data},
        prefixes=catalog.prefixes | {removed: number},
        stored={new[n]: catalog.stored.get(n, n) for n in old_names},
    )


def _renamed_path(path: tuple[Any, ...], rename: Callable[[str, Sequence[Any]], str]) -> tuple[Any, ...]:
    keys = [rename(key, path[:place]) if isinstance(key, str) else key for place, key in enumerate(path)]
    return tuple(key for key in keys if key != "")
