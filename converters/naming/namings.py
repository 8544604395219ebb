"""The naming that the names of a checkpoint's tensors follow, and the rule that gives each of them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families import rules
from converters.families.base import Family, Naming
from converters.families.registry import get_family
from converters.families.rules import Rule
from converters.model.model_info import ModelInfo

_LITGPT = re.compile(r"(^|\.)transformer\.h\.\d+\.attn\.(qkv|attn)\.(weight|bias)$")
_OF_BASE = "model."  # the attribute of transformers' causal models that is the base model


def native_naming(family: Family) -> Naming:
    """The identity naming: of the native names of any naming, or of the parameters of a family without one."""
    if family.namings:
        names = [rule.native for rule in next(iter(family.namings.values())).rules]
    else:
        listed = (p.fqn for args in family.flavors.values() for p in family.parameters(args))
        names = [*dict.fromkeys(re.sub(r"\.\d+\.", ".{n}.", fqn, count=1) for fqn in listed)]
    return Naming("native", tuple(Rule(name, name) for name in names))


def readable_namings(family: Family) -> list[Naming]:
    """All namings in which weights are read: native ones, foreign ones, and those of transformers' base models."""
    without = (_without_model(naming) for naming in family.namings.values())
    return [native_naming(family), *family.namings.values(), *filter(None, without)]


def _without_model(naming: Naming) -> Naming | None:
    """The names of `naming` as transformers' base class saves them (LlamaModel): without `model.`; None without any."""
    if not any(rule.foreign.startswith(_OF_BASE) for rule in naming.rules):
        return None
    rules = (replace(rule, foreign=rule.foreign.removeprefix(_OF_BASE)) for rule in naming.rules)
    drops = (replace(drop, pattern=drop.pattern.removeprefix(_OF_BASE)) for drop in naming.drops)
    return replace(naming, rules=tuple(rules), drops=tuple(drops))


def detect_naming(names: Iterable[str], family: Family, *, nest: str = "", where: str = "") -> Naming:
    """The naming that matches most of `names`, with `nest` in front of every name if that matches more.

    Raises CheckpointError if none matches any.
    """
    names = list(names)
    plain = readable_namings(family)
    candidates = plain + ([_nested(naming, nest) for naming in plain] if nest else [])
    scores = []
    for naming in candidates:
        pattern = any_name(naming)
        scores.append(sum(pattern.fullmatch(name) is not None for name in names))
    if not names or max(scores) == 0:
        if any(map(_LITGPT.search, names)):
            folder = Path(where).parent if Path(where).suffix else Path(where)
            out = folder.with_name(folder.name + "-hf")
            raise CheckpointError(
                f"{prefix(where)}the tensors have litgpt's names, which are not read" + list_offenders(names, most=5),
                hint="litgpt gives them those of Hugging Face",
                tries=[f"litgpt convert_from_litgpt {folder} {out}", f"{out / 'model.pth'} --model-from {folder}"],
            )
        raise CheckpointError(
            f"{prefix(where)}no tensor has a name of a {family.name} model" + list_offenders(names, most=5),
            hint=f"known namings: {', '.join(dict.fromkeys(c.name for c in plain))}",
        )
    return candidates[scores.index(max(scores))]


def count_named(names: Mapping[str, int], family: Family) -> int:
    """Number of tensors with names of the best matching naming of `family`; `names`: name → number of tensors."""
    known = map(any_name, readable_namings(family))
    return max(sum(n for name, n in names.items() if pattern.fullmatch(name)) for pattern in known)


def _nested(naming: Naming, nest: str) -> Naming:
    nested = tuple(replace(rule, foreign=nest + rule.foreign) if rule.foreign else rule for rule in naming.rules)
    return replace(naming, rules=nested, drops=tuple(replace(d, pattern=nest + d.pattern) for d in naming.drops))


@cache
def any_name(naming: Naming) -> re.Pattern[str]:
    """All names of this naming as one pattern, which is matched with every tensor."""
    texts = (*(rule.foreign for rule in naming.rules if rule.foreign), *(drop.pattern for drop in naming.drops))
    return re.compile("|".join(_pattern(text).pattern for text in texts))


def rules_for(natives: Iterable[str], naming: Naming) -> dict[str, Rule]:
    """Rules by native name. Raises UnsupportedError if the naming has no name for a parameter of the model."""
    by_native = {rule.native: rule for rule in naming.rules}
    nameless = dict.fromkeys(name for fqn in natives if (name := with_placeholder(fqn)) not in by_native)
    if nameless:
        what = f"the naming {naming.name!r} has no names for these parameters, so its formats cannot hold the model:"
        raise UnsupportedError(what + list_offenders(list(nameless)))
    return by_native


def namings_for(info: ModelInfo) -> list[Naming]:
    """The namings of a model's family that have names for all of its parameters."""
    family = get_family(info.family)
    asked = {with_placeholder(p.fqn) for p in family.parameters(info.args)}
    namings = [family.naming_for(naming, info.args) for naming in family.namings.values()]
    return [naming for naming in namings if asked <= {rule.native for rule in naming.rules}]


def is_named(fqn: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, in which `{n}` stands for a layer number, is this name."""
    return any(_pattern(text).fullmatch(fqn) for text in patterns)


def fused_with(fqn: str, family: Family) -> tuple[str, ...]:
    """The native tensors that a naming has as one with this one, itself included, or it transposed; () for most."""
    for halves in _fused(tuple(family.namings.values())):
        if with_placeholder(fqn) in halves:
            return tuple(with_number(half, fqn) for half in halves)
    return ()


@cache
def _fused(namings: tuple[Naming, ...]) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for rule in (rule for naming in namings for rule in naming.rules):
        op = rule.op.of if isinstance(rule.op, rules.Transposed) else rule.op
        if isinstance(op, rules.Half | rules.Rows) or op is not rule.op:
            found.setdefault(rule.foreign, []).append(rule.native)
    return [tuple(sorted(halves)) for halves in found.values()]


def drop_reason(name: str, naming: Naming) -> str:
    """Why the naming drops a tensor of this name; "" for others."""
    return next((drop.reason for drop in naming.drops if _pattern(drop.pattern).fullmatch(name)), "")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """`{n}` and `{e}` stand for numbers without leading zeros, so that `layers.1` and `layers.01` are not one name."""
    numbered = re.sub(r"\\\{[ne]\\\}", lambda _: r"(?:0|[1-9]\d*)", re.escape(text))
    return re.compile(numbered.replace(r"\{\*\}", ".+"))


# The number of a block, whatever a family calls its blocks; rules name each layer for multi-token prediction itself
_LAYER = re.compile(r"(?<!mtp_layers\.)(?<=\w\.)\d+(?=\.)")


def with_placeholder(fqn: str) -> str:
    """A name as rules have it: `layers.{n}.` for `layers.3.`."""
    return _LAYER.sub("{n}", fqn, count=1)


def with_number(pattern: str, fqn: str) -> str:
    """A pattern with the layer number of `fqn`: the inverse of `with_placeholder`."""
    found = _LAYER.search(fqn)
    return pattern.replace("{n}", found.group()) if found else pattern


def prefix(where: str) -> str:
    """The beginning of a message about the checkpoint `where`; "" if none is named."""
    return f"{where}: " if where else ""
