"""Which families exist. A user's own family is added by `register` from a module named in `custom_import`."""

from collections.abc import Mapping
from typing import Any

from converters.errors import CheckpointError, UnsupportedError
from converters.families.base import Family
from converters.families.llama3 import LLAMA3

_FAMILIES: dict[str, Family] = {LLAMA3.name: LLAMA3}


def register(family: Family) -> None:
    """Make a family known under its name."""
    _FAMILIES[family.name] = family


def all_families() -> Mapping[str, Family]:
    return _FAMILIES


def get_family(name: str) -> Family:
    """The family of that name. Raises UnsupportedError, naming those that exist."""
    if name not in _FAMILIES:
        raise UnsupportedError(f"no model family is called {name!r}", hint=f"families: {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def family_of_hf_config(config: Mapping[str, Any]) -> Family:
    """The family that reads a transformers config.json. Raises UnsupportedError where none does."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"config.json: its architectures are {architectures!r:.60}, not a list")
    for family in _FAMILIES.values():
        if any(a in family.hf_architectures for a in architectures):
            return family
    known = sorted(a for f in _FAMILIES.values() for a in f.hf_architectures)
    raise UnsupportedError(
        f"config.json names architectures {architectures}, which no family here reads", hint=f"read: {', '.join(known)}"
    )
