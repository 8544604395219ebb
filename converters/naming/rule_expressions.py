"""Expressions over stored tensors that the rules of a naming stand for, in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from converters.families import rules
from converters.families.args import ModelArgs, decoder_args
from converters.families.base import Naming
from converters.families.parameters import Parameter
from converters.families.rules import Rule
from converters.naming.namings import rules_for, with_number, with_placeholder
from converters.views.expressions import AllZeros, Expression, HeadRows, Index, Join, Source, Stack, Take, Transpose


@dataclass(frozen=True, slots=True)
class ForeignTensors:
    """The foreign tensors of a native one: their names and their shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


def foreign_tensors(rule: Rule, parameter: Parameter) -> ForeignTensors:
    """The foreign tensors that a rule makes a parameter of."""
    name, shape = with_number(rule.foreign, parameter.fqn), parameter.shape
    match rule.op:
        case rules.Stacked():
            return ForeignTensors(tuple(name.replace("{e}", str(number)) for number in range(shape[0])), shape[1:])
        case rules.Half(_, dim):
            return ForeignTensors((name,), (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]))
        case rules.Rows(_, total):
            return ForeignTensors((name,), (total, *shape[1:]))
        case rules.Transposed(of):
            return foreign_tensors(replace(rule, op=of), _transposed(parameter))
        case rules.Zeros():
            return ForeignTensors((), shape)
    return ForeignTensors((name,), shape)


def native_expression(op: rules.Op, parameter: Parameter, parts: tuple[Expression, ...], args: ModelArgs) -> Expression:
    """The native tensor, made of foreign ones."""
    match op:
        case rules.RopeHalves():
            return HeadRows(parts[0], decoder_args(args).head_dim, to_halves=False)
        case rules.Stacked():
            return Stack(parts)
        case rules.Half(number, dim):
            return Take(parts[0], dim, number * parameter.shape[dim])
        case rules.Rows(start):
            return Take(parts[0], 0, start)
        case rules.Transposed(of):
            return Transpose(native_expression(of, _transposed(parameter), parts, args))
        case rules.Zeros():
            return AllZeros("float32")
    return parts[0]


def foreign_expressions(
    parameters: Mapping[str, Parameter], naming: Naming, args: ModelArgs
) -> dict[str, tuple[Expression, tuple[int, ...]]]:
    """ForeignTensors name → the tensor, made of native ones, and its shape: the inverse of `native_expression`.

    `parameters`: native name → the parameter with its values, which is another one for a tied output.
    """
    expressions: dict[str, tuple[Expression, tuple[int, ...]]] = {}
    halves: dict[str, dict[int, Expression]] = {}
    rows: dict[str, dict[int, tuple[Expression, int]]] = {}
    by_native = rules_for(parameters, naming)
    for fqn, parameter in parameters.items():
        rule = by_native[with_placeholder(fqn)]
        source: Expression = Source(parameter.fqn)
        foreign, op = foreign_tensors(rule, replace(parameter, fqn=fqn)), rule.op
        if isinstance(op, rules.Transposed):
            source, op = Transpose(source), op.of
        match op:
            case rules.RopeHalves():
                rotated = HeadRows(source, decoder_args(args).head_dim, to_halves=True)
                expressions[foreign.names[0]] = rotated, foreign.shape
            case rules.Stacked():
                num_rows = prod(foreign.shape[:-1])
                expressions |= {n: (Index(source, e, num_rows), foreign.shape) for e, n in enumerate(foreign.names)}
            case rules.Half(number, dim):
                (name,) = foreign.names
                parts = halves.setdefault(name, {})
                parts[number] = source
                expressions[name] = Join(tuple(parts[n] for n in sorted(parts)), dim, foreign.shape), foreign.shape
            case rules.Rows(start):
                (name,) = foreign.names
                rows.setdefault(name, {})[start] = source, parameter.shape[0]
                pieces = [rows[name][n] for n in sorted(rows[name])]
                joined = Join(tuple(p for p, _ in pieces), 0, foreign.shape, tuple(size for _, size in pieces))
                expressions[name] = joined, foreign.shape
            case rules.Same():
                expressions[foreign.names[0]] = source, foreign.shape
    return expressions


def _transposed(parameter: Parameter) -> Parameter:
    """With its last two dims exchanged."""
    *lead, rows, columns = parameter.shape
    return replace(parameter, shape=(*lead, columns, rows))
