"""A view of a checkpoint under other names: a TensorSource made from rules, after a ledger has assigned every tensor.

Nothing is copied. A view reads box by box, so a permutation costs the box and at most one more head on each side.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from converters.catalog import Box, TensorInfo, TensorSource
from converters.compare import first_differing_block
from converters.dtypes import DTYPES
from converters.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.base import EMBEDDING, OUTPUT, Family, ModelArgs, Naming
from converters.families.registry import get_family
from converters.fold import fold_texts
from converters.model_info import ModelInfo
from converters.rules import Op, RopeHalves, Rule

TIED_REASON = "tied: equal to the embedding, bit for bit"


@dataclass(slots=True)
class Ledger:
    """The source of every target tensor, and why a source tensor is not used."""

    used: dict[str, str] = field(default_factory=dict)  # target name → source name
    dropped: dict[str, str] = field(default_factory=dict)  # source name → reason
    missing: list[str] = field(default_factory=list)  # if that is allowed: under the source's naming
    extra: list[str] = field(default_factory=list)  # unknown, if that is allowed


@dataclass(frozen=True, slots=True)
class View:
    """A TensorSource under other names. `ledger` records the assignment of names."""

    source: TensorSource
    tensors: Mapping[str, TensorInfo]
    row_orders: Mapping[str, np.ndarray]  # name → for each row of a head, the source row of that head
    ledger: Ledger

    def read(self, fqn: str, box: Box) -> np.ndarray:
        """The values of a box in the tensor's own dtype."""
        name = self.ledger.used[fqn]
        order = self.row_orders.get(fqn)
        return self.source.read(name, box) if order is None else _read_reordered(self.source, name, box, order)

    def native_rows(self, fqn: str, rows: Sequence[int]) -> Sequence[int]:
        """The native numbers of a foreign view's rows, so that a digest does not depend on the naming."""
        order = self.row_orders.get(fqn)
        return rows if order is None else _reorder(np.asarray(rows), order).tolist()


def _reorder(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    head, within = np.divmod(rows, len(order))
    found: np.ndarray[Any, Any] = head * len(order) + order[within]
    return found


def _read_reordered(source: TensorSource, name: str, box: Box, order: np.ndarray) -> np.ndarray:
    """Rows of `box`, gathered from one span of source rows: exactly its own where the box is whole heads."""
    rows = np.arange(box.offsets[0], box.offsets[0] + box.sizes[0])
    if not rows.size:
        return source.read(name, box)
    source_rows = _reorder(rows, order)
    first, last = int(source_rows.min()), int(source_rows.max())
    span = source.read(name, Box((first, *box.offsets[1:]), (last + 1 - first, *box.sizes[1:])))
    values: np.ndarray[Any, Any] = span[source_rows - first]
    return values


def _native_row_order(op: Op, args: ModelArgs) -> np.ndarray | None:
    """The foreign row of each native row of a head; None where the order is the same."""
    if not isinstance(op, RopeHalves):
        return None
    return np.arange(args.head_dim).reshape(2, args.head_dim // 2).T.reshape(-1)


def native_view(
    source: TensorSource,
    info: ModelInfo,
    naming: Naming,
    *,
    allow_missing: bool = False,
    allow_extra: bool = False,
    where: str = "",
) -> View:
    """`source` under native names.

    Raises CheckpointError with all offenders: unknown, missing, misshapen or non-floating tensors. Tensors that are
    allowed to be missing or unknown are in the ledger instead, and not in the view. A tied model may repeat its output
    weight, which is read, and dropped where it equals the embedding. `where` begins the messages.
    """
    family, args = get_family(info.family), info.args
    by_foreign = _spell(family, args, naming)
    ledger, problems, tied_copy = Ledger(), [], None
    for name in source.tensors:
        if (native := by_foreign.get(name)) is not None:
            if args.tied and native == OUTPUT:
                tied_copy = name
            else:
                ledger.used[native] = name
        elif reason := _drop_reason(name, naming):
            ledger.dropped[name] = reason
        else:
            ledger.extra.append(name)
    if tied_copy is not None and EMBEDDING not in ledger.used:  # the tied weight, under its other name
        ledger.used[EMBEDDING], tied_copy = tied_copy, None
    foreign_of = {native: foreign for foreign, native in by_foreign.items()}
    tensors = {}
    for parameter in family.parameters(args):
        stored = ledger.used.get(parameter.fqn)
        if stored is None:
            ledger.missing.append(foreign_of[parameter.fqn])
            if not allow_missing:
                problems.append(f"missing     {foreign_of[parameter.fqn]}  {list(parameter.shape)}")
            continue
        found = source.tensors[stored]
        if found.shape != parameter.shape:
            problems.append(f"shape       {stored}  is {list(found.shape)}, should be {list(parameter.shape)}")
        if not DTYPES[found.dtype].is_floating:
            problems.append(f"dtype       {stored}  is {found.dtype}, should be a floating type")
        tensors[parameter.fqn] = found
    if not allow_extra:
        problems += [f"unexpected  {name}" for name in ledger.extra]
    if problems:
        raise _ledger_error(problems, naming, missing_output=not args.tied and OUTPUT not in ledger.used, where=where)
    if tied_copy is not None:
        _require_equal(source, ledger.used[EMBEDDING], tied_copy, where=where)
        ledger.dropped[tied_copy] = TIED_REASON
    orders = {rule.native: _native_row_order(rule.op, args) for rule in naming.rules}
    row_orders = {fqn: order for fqn in tensors if (order := orders[_with_placeholder(fqn)]) is not None}
    return View(source, tensors, row_orders, replace(ledger, used={fqn: ledger.used[fqn] for fqn in tensors}))


def foreign_view(native: TensorSource, info: ModelInfo, naming: Naming) -> View:
    """Native tensors under the names and in the row order of `naming`; the inverse of native_view.

    Tensors that `native` lacks, because that was allowed, are missing here, too.
    """
    family, args = get_family(info.family), info.args
    ledger, tensors, row_orders = Ledger(), {}, {}
    natives = {parameter.fqn: parameter.fqn for parameter in family.parameters(args)}
    if args.tied and naming.repeats_tied:
        natives[OUTPUT] = EMBEDDING
    rules = _rules_for(natives, naming)
    for fqn, held in natives.items():
        if held not in native.tensors:
            continue
        rule = rules[_with_placeholder(fqn)]
        name = _with_number(rule.foreign, fqn)
        ledger.used[name] = held
        tensors[name] = native.tensors[held]
        order = _native_row_order(rule.op, args)
        if order is not None:
            row_orders[name] = np.argsort(order)
    return View(native, tensors, row_orders, ledger)


def native_naming(family: Family) -> Naming:
    """The identity naming."""
    some = next(iter(family.namings.values()))
    return Naming("native", tuple(Rule(rule.native, rule.native) for rule in some.rules))


def detect_naming(names: Iterable[str], family: Family, *, nest: str = "", where: str = "") -> Naming:
    """The naming that matches most of `names`, with `nest` in front of every name where that matches more.

    Raises CheckpointError where none matches any.
    """
    names = list(names)
    plain = [native_naming(family), *family.namings.values()]
    candidates = plain + ([_nested(naming, nest) for naming in plain] if nest else [])
    scores = []
    for naming in candidates:
        known = _any_name(naming)
        scores.append(sum(known.fullmatch(name) is not None for name in names))
    if not names or max(scores) == 0:
        raise CheckpointError(
            f"{_prefix(where)}no tensor has a name of a {family.name} model" + list_offenders(names, most=5),
            hint=f"known namings: {', '.join(c.name for c in plain)}",
        )
    return candidates[scores.index(max(scores))]


def count_named(names: Mapping[str, int], family: Family) -> int:
    """How many tensors have names of the best matching naming of `family`; `names`: name → number of tensors."""
    namings = [native_naming(family), *family.namings.values()]
    return max(sum(n for name, n in names.items() if _any_name(naming).fullmatch(name)) for naming in namings)


def _nested(naming: Naming, nest: str) -> Naming:
    rules = tuple(replace(rule, foreign=nest + rule.foreign) for rule in naming.rules)
    return replace(naming, rules=rules, drops=tuple(replace(d, pattern=nest + d.pattern) for d in naming.drops))


@cache
def _any_name(naming: Naming) -> re.Pattern[str]:
    """All names of this naming as one pattern, which is matched with every tensor."""
    texts = (*(rule.foreign for rule in naming.rules), *(drop.pattern for drop in naming.drops))
    return re.compile("|".join(_pattern(text).pattern for text in texts))


def _spell(family: Family, args: ModelArgs, naming: Naming) -> dict[str, str]:
    """Foreign name → native name of every tensor that a checkpoint of this model may hold, a tied output included."""
    natives = [parameter.fqn for parameter in family.parameters(args)]
    if args.tied:
        natives.append(OUTPUT)
    rules = _rules_for(natives, naming)
    return {_with_number(rules[_with_placeholder(fqn)].foreign, fqn): fqn for fqn in natives}


def _rules_for(natives: Iterable[str], naming: Naming) -> dict[str, Rule]:
    """Rules by native name. Raises UnsupportedError where the naming has no name for a parameter of the model."""
    rules = {rule.native: rule for rule in naming.rules}
    nameless = dict.fromkeys(name for fqn in natives if (name := _with_placeholder(fqn)) not in rules)
    if nameless:
        what = f"the naming {naming.name!r} has no names for these parameters, so its formats cannot hold the model:"
        raise UnsupportedError(what + list_offenders(list(nameless)))
    return rules


def is_named(fqn: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, in which `{n}` stands for a layer number, is this name."""
    return any(_pattern(text).fullmatch(fqn) for text in patterns)


def _drop_reason(name: str, naming: Naming) -> str:
    return next((drop.reason for drop in naming.drops if _pattern(drop.pattern).fullmatch(name)), "")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """`{n}` stands for a layer number without leading zeros, so that `layers.1` and `layers.01` are not one name."""
    return re.compile(re.escape(text).replace(r"\{n\}", r"(?:0|[1-9]\d*)"))


_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


def _with_placeholder(fqn: str) -> str:
    return _LAYER.sub("{n}", fqn, count=1)


def _with_number(pattern: str, fqn: str) -> str:
    found = _LAYER.search(fqn)
    return pattern.replace("{n}", found.group()) if found else pattern


def _require_equal(source: TensorSource, one: str, other: str, *, where: str) -> None:
    """Raise CheckpointError unless two tensors hold the same bits. Reads them in blocks."""
    a, b = source.tensors[one], source.tensors[other]
    problem = ""
    if a != b:
        problem = f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    elif block := first_differing_block(source, one, source, other):
        problem = f"they differ in rows {block.offsets[0]} to {block.offsets[0] + block.sizes[0] - 1}"
    if problem:
        raise CheckpointError(
            f"{_prefix(where)}the model is tied, but {other} differs from {one}: {problem}",
            hint="dropping it would change the model; an untied model has tie_word_embeddings: false in config.json",
        )


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _ledger_error(problems: list[str], naming: Naming, *, missing_output: bool, where: str) -> CheckpointError:
    hints = [f"names were read as {naming.name!r}"]
    if missing_output:
        hints.append("the output weight is missing: a tied model has tie_word_embeddings: true in config.json")
    found = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    listed = sorted(problems) if len(problems) <= 20 else fold_texts(sorted(problems))  # so that all fit on a page
    return CheckpointError(
        f"{_prefix(where)}the tensors do not match the model, {found}:" + list_offenders(listed),
        hint="; ".join(hints),
    )
