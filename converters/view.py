"""A view of a checkpoint under other names: a TensorSource made from rules, after a ledger has assigned every tensor.

Nothing is copied. Each tensor of a view is an expression over tensors of its source, which is read box by box.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

import numpy as np

from converters import rules
from converters.catalog import Box, TensorInfo, TensorSource
from converters.compare import first_differing_block
from converters.dtypes import DTYPES
from converters.errors import CheckpointError, UnsupportedError, list_offenders
from converters.expressions import (
    AllZeros,
    Expression,
    HeadRows,
    Index,
    Join,
    RowNumbers,
    Rows,
    Source,
    Stack,
    Take,
    source_rows,
)
from converters.families.base import EMBEDDING, OUTPUT, Family, ModelArgs, Naming, Parameter
from converters.families.registry import get_family
from converters.fold import fold_texts
from converters.model_info import ModelInfo
from converters.quantization import KEY, SCALE, is_quantized
from converters.quantized_tensors import QuantizedTensors
from converters.rules import Rule

TIED_REASON = "tied: equal to the embedding, bit for bit"
_STAYS = "is float8: norms, embedding, output, routers, biases and eh_proj are not quantized in such checkpoints"
REPEATED_REASON = "a copy of "  # + the name of the first
NOT_SAVED_REASON = "a buffer that training changes; this checkpoint has it in no layer"


@dataclass(slots=True)
class Ledger:
    """The sources of every target tensor, and why a source tensor is not used."""

    used: dict[str, tuple[str, ...]] = field(default_factory=dict)  # target name → source names
    dropped: dict[str, str] = field(default_factory=dict)  # source name → reason
    missing: list[str] = field(default_factory=list)  # if that is allowed: under the source's naming
    extra: list[str] = field(default_factory=list)  # unknown, if that is allowed
    made: dict[str, str] = field(default_factory=dict)  # target that is zeros, without a source → reason
    scales: set[str] = field(default_factory=set)  # of the names in `used`: those of scales, not of values
    repeated: dict[str, str] = field(default_factory=dict)  # dropped source name → the target that it is a copy of


@dataclass(frozen=True, slots=True)
class View:
    """A TensorSource under other names. `ledger` records the assignment of names."""

    source: TensorSource
    tensors: Mapping[str, TensorInfo]
    expressions: Mapping[str, Expression]  # by name; over `source`
    ledger: Ledger

    def read(self, fqn: str, box: Box) -> np.ndarray:
        """The values of a box in the tensor's own dtype."""
        return self.expressions[fqn].read(self.source, box)

    def native_rows(self, fqn: str, rows: Rows) -> Rows:
        """The native numbers of a foreign view's rows, so that a digest does not depend on the naming."""
        expression = self.expressions.get(fqn)
        return rows if expression is None else source_rows(expression, rows)


@dataclass(frozen=True, slots=True)
class _Foreign:
    """The foreign tensors of a native one: their names and their shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


def _foreign(rule: Rule, parameter: Parameter) -> _Foreign:
    name, shape = _with_number(rule.foreign, parameter.fqn), parameter.shape
    match rule.op:
        case rules.Stacked():
            return _Foreign(tuple(name.replace("{e}", str(number)) for number in range(shape[0])), shape[1:])
        case rules.Half(_, dim):
            return _Foreign((name,), (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]))
        case rules.Zeros():
            return _Foreign((), shape)
    return _Foreign((name,), shape)


def _native_expression(
    op: rules.Op, parameter: Parameter, parts: tuple[Expression, ...], args: ModelArgs
) -> Expression:
    """The native tensor, made of foreign ones."""
    match op:
        case rules.RopeHalves():
            return HeadRows(parts[0], args.head_dim, to_halves=False)
        case rules.Stacked():
            return Stack(parts)
        case rules.Half(number, dim):
            return Take(parts[0], dim, number * parameter.shape[dim])
        case rules.Zeros():
            return AllZeros("float32")
    return parts[0]


def _foreign_expressions(
    held: Mapping[str, Parameter], naming: Naming, args: ModelArgs
) -> dict[str, tuple[Expression, tuple[int, ...]]]:
    """Foreign name → the tensor, made of native ones, and its shape: the inverse of `_native_expression`.

    `held`: native name → the parameter with its values, which is another one for a tied output.
    """
    made: dict[str, tuple[Expression, tuple[int, ...]]] = {}
    halves: dict[str, dict[int, Expression]] = {}
    by_native = _rules_for(held, naming)
    for fqn, parameter in held.items():
        rule, source = by_native[_with_placeholder(fqn)], Source(parameter.fqn)
        foreign = _foreign(rule, replace(parameter, fqn=fqn))
        match rule.op:
            case rules.RopeHalves():
                made[foreign.names[0]] = HeadRows(source, args.head_dim, to_halves=True), foreign.shape
            case rules.Stacked():
                num_rows = prod(foreign.shape[:-1])
                made |= {n: (Index(source, e, num_rows), foreign.shape) for e, n in enumerate(foreign.names)}
            case rules.Half(number, dim):
                (name,) = foreign.names
                parts = halves.setdefault(name, {})
                parts[number] = source
                made[name] = Join(tuple(parts[n] for n in sorted(parts)), dim, foreign.shape), foreign.shape
            case rules.Same():
                made[foreign.names[0]] = source, foreign.shape
    return made


def native_view(
    source: TensorSource,
    info: ModelInfo,
    naming: Naming,
    *,
    allow_missing: bool = False,
    allow_extra: bool = False,
    quantized: QuantizedTensors | None = None,
    where: str = "",
) -> View:
    """`source` under native names; `quantized`: its weights whose values are codes times scales.

    Raises CheckpointError with all offenders: unknown, missing, misshapen or non-floating tensors, parts of one
    tensor that differ in dtype, and quantized weights that do not match their scales. Tensors that are allowed to be
    missing or unknown are in the ledger instead, and not in the view; a tensor of which only some parts are there is an
    error in any case. A tied model may repeat its output weight, which is read, and dropped where it equals the
    embedding. `where` begins the messages.
    """
    family, args = get_family(info.family), info.args
    naming, parameters = family.naming_for(naming, args), family.parameters(args)
    outputs = [replace(p, fqn=OUTPUT) for p in parameters if p.fqn == EMBEDDING and args.tied]
    by_native = _rules_for((p.fqn for p in (*parameters, *outputs)), naming)
    rule_of = {p.fqn: by_native[_with_placeholder(p.fqn)] for p in (*parameters, *outputs)}
    foreign_of = {p.fqn: _foreign(rule_of[p.fqn], p) for p in (*parameters, *outputs)}
    tied_names = {name for p in outputs for name in foreign_of[p.fqn].names}
    known = {name for foreign in foreign_of.values() for name in foreign.names}
    ledger, found, problems, tied_copy = Ledger(), set[str](), list[str](), None
    scales = quantized.scales if quantized else {}
    repeats = {rule.foreign: rule.native for rule in naming.repeats}
    for name in source.tensors:
        if name in scales:
            continue
        if name in tied_names:
            tied_copy = name
        elif name in known:
            found.add(name)
        elif name in repeats:
            ledger.repeated[name] = repeats[name]
            ledger.dropped[name] = REPEATED_REASON + repeats[name]
        elif reason := _drop_reason(name, naming):
            ledger.dropped[name] = reason
        else:
            ledger.extra.append(name)
    unknown = set(ledger.extra)
    for name, weight in scales.items():  # what happens to a weight happens to its scales
        if reason := _drop_reason(weight, naming):
            ledger.dropped[name] = reason
        elif weight in unknown:
            ledger.extra.append(name)
    if tied_copy is not None and not found.intersection(foreign_of[EMBEDDING].names):
        # the tied weight, under its other name
        foreign_of[EMBEDDING] = replace(foreign_of[EMBEDDING], names=(tied_copy,))
        found.add(tied_copy)
        tied_copy = None
    not_saved = set() if naming.has_buffers else _not_saved(parameters, foreign_of, found)
    tensors, expressions = {}, {}
    for parameter in parameters:
        fqn, op, foreign = parameter.fqn, rule_of[parameter.fqn].op, foreign_of[parameter.fqn]
        if isinstance(op, rules.Zeros) or fqn in not_saved:
            ledger.made[fqn] = op.reason if isinstance(op, rules.Zeros) else NOT_SAVED_REASON
            op, foreign = rules.Zeros(ledger.made[fqn]), replace(foreign, names=())
        absent = [name for name in foreign.names if name not in found]
        if absent:
            ledger.missing += absent
            if not allow_missing:
                problems += [f"missing     {name}  {list(foreign.shape)}" for name in absent]
            elif len(absent) < len(foreign.names):
                rest = f"only all parts of {fqn} together may be missing"
                problems += [f"missing     {name}  {list(foreign.shape)}: {rest}" for name in absent]
        present = {name: source.tensors[name] for name in foreign.names if name in found}
        if quantized:
            if not is_quantized(parameter):
                problems += [f"quantized   {n}  {_STAYS}" for n in present if n in quantized.expressions]
            present = {name: quantized.native_info(name, info) for name, info in present.items()}
        problems += _part_problems(present, foreign.shape)
        if absent:
            continue
        values = quantized.expressions if quantized else {}
        parts = tuple(values.get(name) or Source(name) for name in foreign.names)
        expressions[fqn] = _native_expression(op, parameter, parts, args)
        dtype = present[foreign.names[0]].dtype if present else "float32"
        tensors[fqn] = TensorInfo(dtype, parameter.shape)
        ledger.used[fqn] = expressions[fqn].sources
    ledger.missing = list(dict.fromkeys(ledger.missing))
    if quantized:
        ledger.scales = {name for names in ledger.used.values() for name in names if name in scales}
        gone = {*ledger.dropped, *ledger.extra}
        problems += [text for n, text in quantized.problems.items() if gone.isdisjoint((n, n.removesuffix(SCALE)))]
    if not allow_extra:
        problems += [f"unexpected  {name}" for name in ledger.extra]
    elif not quantized:
        problems += [f"unexpected  {n}: scales of {of}" for n in ledger.extra if (of := _scaled_by(n, source.tensors))]
    if problems:
        missing_output = not args.tied and OUTPUT not in ledger.used
        raise _ledger_error(
            list(dict.fromkeys(problems)), family, naming, ledger.extra, missing_output=missing_output, where=where
        )
    if tied_copy is not None:
        _require_equal(source, ledger.used[EMBEDDING][0], tied_copy, where=where)
        ledger.dropped[tied_copy] = TIED_REASON
    return View(source, tensors, expressions, ledger)


def _not_saved(parameters: Sequence[Parameter], foreign_of: Mapping[str, _Foreign], found: set[str]) -> set[str]:
    """The buffers that training changes, where the source has none: then there is nothing to lose, they are zero."""
    buffers = [p.fqn for p in parameters if not p.is_trained]
    return set(buffers) if found.isdisjoint(n for fqn in buffers for n in foreign_of[fqn].names) else set()


def _scaled_by(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    """The float8 weight that a tensor of this name has the scales of; "" for others."""
    ends = {SCALE: "", "_scale": "", ".scale": ".weight"}  # the last: in DeepSeek's own names
    weights = (name.removesuffix(end) + instead for end, instead in ends.items() if name.endswith(end))
    return next((n for n in weights if n in tensors and tensors[n].dtype.startswith("float8")), "")


def _part_problems(parts: Mapping[str, TensorInfo], shape: tuple[int, ...]) -> list[str]:
    """What is wrong with the foreign tensors that make one native tensor."""
    problems = []
    usual = Counter(info.dtype for info in parts.values()).most_common(1)
    for name, info in parts.items():
        if info.shape != shape:
            problems.append(f"shape       {name}  is {list(info.shape)}, should be {list(shape)}")
        if not DTYPES[info.dtype].is_floating:
            problems.append(f"dtype       {name}  is {info.dtype}, should be a floating type")
        elif info.dtype != usual[0][0]:
            problems.append(f"dtype       {name}  is {info.dtype}, the others that it is stacked with {usual[0][0]}")
    return problems


def foreign_view(native: TensorSource, info: ModelInfo, naming: Naming) -> View:
    """Native tensors under the names and in the row order of `naming`; the inverse of native_view.

    Tensors that `native` lacks, because that was allowed, are missing here, too. Native tensors that the naming has no
    name for are in `ledger.dropped`: the caller makes sure that they are zero (rules.Zeros). Raises CheckpointError
    where a foreign tensor would be made of native ones that differ in dtype, or of which some are missing.
    """
    family, args = get_family(info.family), info.args
    naming = family.naming_for(naming, args)
    second = {rule.foreign: rule.native for rule in naming.repeats}
    held = {p.fqn: p for p in family.parameters(args)}
    if args.tied and naming.repeats_tied:
        held[OUTPUT] = held[EMBEDDING]
    ledger, tensors, expressions, problems = Ledger(), {}, {}, []
    by_native = _rules_for(held, naming)
    for fqn, parameter in held.items():
        op = by_native[_with_placeholder(fqn)].op
        if isinstance(op, rules.Zeros) and parameter.fqn in native.tensors:
            ledger.dropped[fqn] = op.reason
    made = _foreign_expressions(held, naming, args)
    made |= {name: (Source(held[fqn].fqn), held[fqn].shape) for name, fqn in second.items()}
    for name, (expression, shape) in made.items():
        present = [part for part in expression.sources if part in native.tensors]
        if not present:
            continue
        dtypes = {part: native.tensors[part].dtype for part in present}
        if len(present) < len(expression.sources):
            lacking = [part for part in expression.sources if part not in present]
            problems.append(f"{name}: {', '.join(present)} without {', '.join(lacking)}")
        elif len(set(dtypes.values())) > 1:
            problems.append(f"{name}: " + ", ".join(f"{part} is {dtype}" for part, dtype in dtypes.items()))
        else:
            expressions[name] = expression
            tensors[name] = TensorInfo(dtypes[present[0]], shape)
            ledger.used[name] = expression.sources
    if problems:
        raise CheckpointError(
            f"the naming {naming.name!r} has one tensor for these, which cannot be made:" + list_offenders(problems)
        )
    return View(native, tensors, expressions, ledger)


def native_row_numbers(info: ModelInfo, naming: Naming) -> RowNumbers | None:
    """The native numbers of the rows of tensors under their names in `naming`; None where all are the same."""
    parameters = get_family(info.family).parameters(info.args)
    view = foreign_view(_Shapes({p.fqn: TensorInfo("float32", p.shape) for p in parameters}), info, naming)
    is_same = all(isinstance(expression, Source) for expression in view.expressions.values())
    return None if is_same else view.native_rows


@dataclass(frozen=True, slots=True)
class _Shapes:
    """A TensorSource whose values nobody reads."""

    tensors: Mapping[str, TensorInfo]

    def read(self, fqn: str, box: Box) -> np.ndarray:
        raise AssertionError(f"{fqn}: only its shape is known")


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
    known = [_any_name(naming) for naming in (native_naming(family), *family.namings.values())]
    return max(sum(n for name, n in names.items() if pattern.fullmatch(name)) for pattern in known)


def _nested(naming: Naming, nest: str) -> Naming:
    nested = tuple(replace(rule, foreign=nest + rule.foreign) if rule.foreign else rule for rule in naming.rules)
    return replace(naming, rules=nested, drops=tuple(replace(d, pattern=nest + d.pattern) for d in naming.drops))


@cache
def _any_name(naming: Naming) -> re.Pattern[str]:
    """All names of this naming as one pattern, which is matched with every tensor."""
    texts = (*(rule.foreign for rule in naming.rules if rule.foreign), *(drop.pattern for drop in naming.drops))
    return re.compile("|".join(_pattern(text).pattern for text in texts))


def _rules_for(natives: Iterable[str], naming: Naming) -> dict[str, Rule]:
    """Rules by native name. Raises UnsupportedError where the naming has no name for a parameter of the model."""
    by_native = {rule.native: rule for rule in naming.rules}
    nameless = dict.fromkeys(name for fqn in natives if (name := _with_placeholder(fqn)) not in by_native)
    if nameless:
        what = f"the naming {naming.name!r} has no names for these parameters, so its formats cannot hold the model:"
        raise UnsupportedError(what + list_offenders(list(nameless)))
    return by_native


def namings_for(info: ModelInfo) -> list[Naming]:
    """The namings of a model's family that have names for all of its parameters."""
    family = get_family(info.family)
    asked = {_with_placeholder(p.fqn) for p in family.parameters(info.args)}
    namings = [family.naming_for(naming, info.args) for naming in family.namings.values()]
    return [naming for naming in namings if asked <= {rule.native for rule in naming.rules}]


def is_named(fqn: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, in which `{n}` stands for a layer number, is this name."""
    return any(_pattern(text).fullmatch(fqn) for text in patterns)


def fused_with(fqn: str, family: Family) -> tuple[str, ...]:
    """The native tensors that a naming of the family has as one with this one, itself included; () for most."""
    for halves in _fused(tuple(family.namings.values())):
        if _with_placeholder(fqn) in halves:
            return tuple(_with_number(half, fqn) for half in halves)
    return ()


@cache
def _fused(namings: tuple[Naming, ...]) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for rule in (rule for naming in namings for rule in naming.rules if isinstance(rule.op, rules.Half)):
        found.setdefault(rule.foreign, []).append(rule.native)
    return [tuple(sorted(halves)) for halves in found.values()]


def _drop_reason(name: str, naming: Naming) -> str:
    return next((drop.reason for drop in naming.drops if _pattern(drop.pattern).fullmatch(name)), "")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """`{n}` and `{e}` stand for numbers without leading zeros, so that `layers.1` and `layers.01` are not one name."""
    return re.compile(re.sub(r"\\\{[ne]\\\}", lambda _: r"(?:0|[1-9]\d*)", re.escape(text)))


_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


def _with_placeholder(fqn: str) -> str:
    return _LAYER.sub("{n}", fqn, count=1)


def _with_number(pattern: str, fqn: str) -> str:
    found = _LAYER.search(fqn)
    return pattern.replace("{n}", found.group()) if found else pattern


def first_difference(source: TensorSource, one: str, other: str) -> str:
    """Where two tensors do not hold the same bits; "" where they do. Reads them in blocks."""
    a, b = source.tensors[one], source.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    if block := first_differing_block(source, one, source, other):
        return f"they differ in rows {block.offsets[0]} to {block.offsets[0] + block.sizes[0] - 1}"
    return ""


def _require_equal(source: TensorSource, one: str, other: str, *, where: str) -> None:
    """Raise CheckpointError unless two tensors hold the same bits."""
    if problem := first_difference(source, one, other):
        raise CheckpointError(
            f"{_prefix(where)}the model is tied, but {other} differs from {one}: {problem}",
            hint="dropping it would change the model; an untied model has tie_word_embeddings: false in config.json",
        )


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _ledger_error(
    problems: list[str],
    family: Family,
    naming: Naming,
    extra: Sequence[str],
    *,
    missing_output: bool,
    where: str,
) -> CheckpointError:
    hints = [f"names were read as {naming.name!r}"]
    if missing_output:
        hints.append("the output weight is missing: a tied model has tie_word_embeddings: true in config.json")
    if any(name.endswith(SCALE) for name in extra):
        hints.append(f"scales of float8 weights are read where config.json has a {KEY}")
    own = _any_name(naming)
    strangers = [name for name in extra if not own.fullmatch(name)]
    for other in family.namings.values():
        if any(_any_name(other).fullmatch(name) for name in strangers):
            hints.append(f"some of the unexpected names are those of {other.name!r}: one model, stored in two forms?")
            break
    found = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    listed = sorted(problems) if len(problems) <= 20 else fold_texts(sorted(problems))  # so that all fit on a page
    return CheckpointError(
        f"{_prefix(where)}the tensors do not match the model, {found}:" + list_offenders(listed),
        hint="; ".join(hints),
    )
