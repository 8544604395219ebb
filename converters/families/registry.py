"""Which families exist. A user's own is added by `register`, from a module that `custom_import` or `--import` names."""

from collections.abc import Mapping
from typing import Any

from converters.errors import CheckpointError, UnsupportedError
from converters.families.base import Family, ModelArgs
from converters.families.llama2 import LLAMA2
from converters.families.llama3 import LLAMA3
from converters.families.qwen3 import QWEN3

_FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA3, LLAMA2, QWEN3)}


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


def read_hf_config(config: Mapping[str, Any]) -> tuple[Family, ModelArgs]:
    """Family and numbers of a transformers config.json. Raises UnsupportedError where no family reads it."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"config.json: its architectures are {architectures!r:.60}, not a list")
    for family in _FAMILIES.values():
        if any(a in family.hf_architectures for a in architectures):
            args = family.args_from_hf_config(config)
            if family.claims(args):
                return family, args
    known = sorted({a for f in _FAMILIES.values() for a in f.hf_architectures})
    raise UnsupportedError(
        f"config.json names architectures {architectures}, which no family here reads",
        hint=f"read: {', '.join(known)}; a family of your own is imported first",
        tries=["titan --import MODULE …"],
    )


def read_meta_params(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Family, ModelArgs]:
    """Family and numbers of a params.json, which names no family; `shapes`: the weights', as far as they are known."""
    for family in _FAMILIES.values():
        if family.args_from_meta_params is not None:
            args = family.args_from_meta_params(params, shapes)
            if family.claims(args):
                return family, args
    raise UnsupportedError("params.json describes a model that no family here reads")
