"""Native tensors under the names of a naming: the inverse of native_view."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from converters.common.box import Box, TensorInfo, TensorSource
from converters.common.errors import CheckpointError, list_offenders
from converters.families import rules
from converters.families.args import is_tied
from converters.families.base import Naming
from converters.families.parameters import EMBEDDING, OUTPUT
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.naming.namings import rules_for, with_placeholder
from converters.naming.rule_expressions import foreign_expressions
from converters.views.expressions import RowNumbers, Source
from converters.views.view import Ledger, View


def foreign_view(native: TensorSource, info: ModelInfo, naming: Naming) -> View:
    """Native tensors under the names and in the row order of `naming`; the inverse of native_view.

    Tensors that `native` lacks, because that was allowed, are missing here, too. Native tensors that the naming has no
    name for are in `ledger.dropped`: the caller makes sure that they are zero (rules.Zeros). Raises CheckpointError
    if a foreign tensor would be made of native ones that differ in dtype, or of which some are missing.
    """
    family, args = get_family(info.family), info.args
    naming = family.naming_for(naming, args)
    repeated = {rule.foreign: rule.native for rule in naming.repeats}
    parameters = {p.fqn: p for p in family.parameters(args)}
    if is_tied(args) and naming.repeats_tied:
        parameters[OUTPUT] = parameters[EMBEDDING]
    ledger, tensors, expressions, problems = Ledger(), {}, {}, []
    by_native = rules_for(parameters, naming)
    for fqn, parameter in parameters.items():
        op = by_native[with_placeholder(fqn)].op
        if isinstance(op, rules.Zeros) and parameter.fqn in native.tensors:
            ledger.dropped[fqn] = op.reason
    foreign = foreign_expressions(parameters, naming, args)
    foreign |= {name: (Source(parameters[fqn].fqn), parameters[fqn].shape) for name, fqn in repeated.items()}
    for name, (expression, shape) in foreign.items():
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
    """The native numbers of the rows of tensors under their names in `naming`; None if all are the same."""
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
