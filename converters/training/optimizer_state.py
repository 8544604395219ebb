"""Plan the optimizer of a training checkpoint: assign states to parameters, check them, translate their names.

Native names do not change. Other namings are translated: a state gets its parameter's native name and is made as its
parameter is (permuted, stacked, or one half of a tensor); settings of numbered groups are written for each parameter,
as in torch's `flatten_optimizer_state_dict` and in the trainer, because group numbers collide between pipeline stages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converters.common.box import Box, TensorInfo, TensorSource
from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import OPTIMIZER
from converters.containers.dcp_item import blob_item, read_blob_item
from converters.engine.read import CatalogReader
from converters.families.parameters import EMBEDDING, OUTPUT, Parameter
from converters.views.compare import first_differing_block
from converters.views.expressions import Expression, Source
from converters.views.view import TIED_REASON

STATE, GROUPS = f"{OPTIMIZER}.state.", f"{OPTIMIZER}.param_groups."
# States of torch's optimizers, and of Muon, that have their parameter's shape
_LIKE_PARAMETER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta")
    + ("sum", "prev", "step_size", "ax")
)
TIED_SETTING = "tied: the embedding has settings of its own"
_ABOUT_PARAMETERS = ("params", "param_names")  # keys of a group that list its members


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """The parameters of a model and how a checkpoint's optimizer may spell them."""

    parameters: Sequence[Parameter]
    spelled: Mapping[str, str]  # as spelled in the checkpoint → the checkpoint's weight
    natives: Mapping[str, tuple[str, ...]]  # weight → native names of what it is, or is a part of
    expressions: Mapping[str, Expression]  # native name → how weights make it (see View)
    shapes: Mapping[str, tuple[int, ...]]  # of the weights
    are_native: bool  # nothing needs translation
    keep_places: bool  # every weight keeps its name, but for its dict's, and its rows
    tied: bool


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that is made of the checkpoint's."""

    expression: Expression
    info: TensorInfo
    parameter: str = ""  # whose shape it has, as a moment; "" for another shape, such as that of a step


@dataclass(frozen=True, slots=True)
class Number:
    """A 0-dim tensor that is made of a plain value."""

    value: np.ndarray


@dataclass(frozen=True, slots=True)
class CopiedValue:
    """A value whose bytes are copied."""

    name: str  # in the checkpoint


@dataclass(frozen=True, slots=True)
class NewValue:
    """A value that was a tensor."""

    item: bytes


Entry = MadeTensor | Number | CopiedValue | NewValue


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What to write for an optimizer, and from where."""

    entries: Mapping[str, Entry]  # by the name to write
    dropped: Mapping[str, str]  # the checkpoint's name → reason
    without_state: Sequence[str]  # parameters that lack states, if that is allowed
    unknown: Sequence[str]  # entries that are neither state nor setting; copied unchanged


class _MisfitError(Exception):
    """Entries that do not match the model: all problems of them."""

    def __init__(self, *problems: str):
        self.problems = problems


def plan_optimizer(reader: CatalogReader, names: ParameterNames, *, allow_missing: bool = False) -> OptimizerPlan:
    """Plan the optimizer section of `reader`. Raises CheckpointError with everything that does not match the model.

    Parameters need not have the same kinds of state (Muon and AdamW), but one with a subset of another's kinds lacks
    some, unless `allow_missing`. Numbered states (`state.0.…`) are refused: their parameters are unknown.
    """
    listed = [n for n in reader.catalog.names if n.startswith(f"{OPTIMIZER}.")]
    settings = [name for name in listed if name.startswith(GROUPS)]
    unknown = [name for name in listed if not name.startswith((GROUPS, STATE))]
    assigned, problems = _assign_states([name for name in listed if name.startswith(STATE)], names)
    states = {key: name for key, name in assigned.items() if not _is_second(key[0], names)}
    second = {kind: name for (weight, kind), name in assigned.items() if _is_second(weight, names)}
    elementwise = _elementwise_kinds(reader, names, states)
    shapes = {p.fqn: p.shape for p in names.parameters if p.is_trained}
    kinds_of: dict[str, set[str]] = {fqn: set() for fqn in shapes}
    entries = {name: _unchanged(reader, name) for name in unknown}
    for weight, kind in states:
        for owner in names.natives[weight]:
            if kind in kinds_of[owner]:
                continue
            kinds_of[owner].add(kind)
            try:
                entries[f"{STATE}{owner}.{kind}"] = _plan_state(
                    reader, names, states, owner, kind, shape=shapes[owner], is_elementwise=kind in elementwise
                )
            except _MisfitError as misfit:
                problems += misfit.problems
    for kind, name in second.items():
        problems += _second_problems(reader, entries.get(f"{STATE}{EMBEDDING}.{kind}"), name)
    lacking: dict[str, list[str]] = {}
    if any(kinds_of.values()):
        lacking = {fqn: kinds for fqn in kinds_of if (kinds := _lacking(kinds_of[fqn], kinds_of.values()))}
    if not allow_missing:
        problems += [f"missing     {STATE}{fqn}.{kind}" for fqn, kinds in lacking.items() for kind in kinds]
    try:
        groups, left_out = _plan_groups(reader, names, settings)
    except _MisfitError as misfit:
        problems += misfit.problems
    if problems:
        raise _misfit(problems, numbered=any(n.removeprefix(STATE)[:1].isdecimal() for n in listed))
    dropped = {**dict.fromkeys(second.values(), TIED_REASON), **left_out}
    return OptimizerPlan(entries | groups, dropped, [*lacking], unknown)


def _assign_states(listed: Sequence[str], names: ParameterNames) -> tuple[dict[tuple[str, str], str], list[str]]:
    """(weight, kind) → entry, and problems of entries that are of no parameter, or of one that has another."""
    trained = {p.fqn for p in names.parameters if p.is_trained}
    states: dict[tuple[str, str], str] = {}
    problems = []
    for name in listed:
        owners, weight, kind = _owners(name.removeprefix(STATE), names)
        if not owners or not (trained.issuperset(owners) or _is_second(weight, names)):
            problems.append(f"unexpected  {name}")
        elif (other := states.setdefault((weight, kind), name)) != name:
            problems.append(f"twice       {name}  and {other} are one state of one parameter")
    return states, problems


def _is_second(weight: str, names: ParameterNames) -> bool:
    """Whether a weight is the output of a tied model, whose states are in addition to the embedding's."""
    return names.tied and names.natives[weight] == (OUTPUT,)


def _owners(rest: str, names: ParameterNames) -> tuple[tuple[str, ...], str, str]:
    """(native names, weight, kind) of `<name>.<kind>`; ((), "", …) where there is no such parameter."""
    at = rest.rfind(".")
    while at > 0:
        if (weight := names.spelled.get(rest[:at])) is not None:
            return names.natives[weight], weight, rest[at + 1 :]
        at = rest.rfind(".", 0, at)
    return (), "", rest


def _elementwise_kinds(
    reader: CatalogReader, names: ParameterNames, states: Mapping[tuple[str, str], str]
) -> frozenset[str]:
    """Kinds of state with a value for each of a parameter's: an unknown one has the shape of every parameter.

    A preconditioner, a matrix for the rows or columns of a weight, has the shape of square ones only.
    """
    others = {
        kind
        for (weight, kind), name in states.items()
        if name in reader.tensors and reader.tensors[name].shape not in ((), names.shapes[weight])
    }
    return _LIKE_PARAMETER | {kind for _, kind in states if kind not in others}


def _plan_state(
    reader: CatalogReader,
    names: ParameterNames,
    states: Mapping[tuple[str, str], str],
    owner: str,
    kind: str,
    *,
    shape: tuple[int, ...],
    is_elementwise: bool,
) -> Entry:
    """One state of a native parameter of that shape, made of those of the weights that make it."""
    expression = names.expressions[owner]
    lacking = [weight for weight in expression.sources if (weight, kind) not in states]
    if lacking:
        raise _MisfitError(*(f"missing     {STATE}{weight}.{kind}" for weight in lacking))
    parts = {weight: states[weight, kind] for weight in expression.sources}
    infos = {name: reader.tensors[name] for name in parts.values() if name in reader.tensors}
    if len(infos) < len(parts):
        return _plan_value(reader, [*parts.values()], f"{STATE}{owner}.{kind}", keep=names.are_native or kind != "step")
    first, *rest = parts.values()
    odd = {n: weight for weight, n in parts.items() if infos[n].shape != names.shapes[weight]}
    if not odd and (is_elementwise or isinstance(expression, Source)):
        dtype = infos[first].dtype
        if wrong := [name for name in rest if infos[name].dtype != dtype]:
            text = f"the others that it is stacked with {dtype}"
            raise _MisfitError(*(f"dtype       {name}  is {infos[name].dtype}, {text}" for name in wrong))
        return MadeTensor(expression.renamed(parts.__getitem__), TensorInfo(dtype, shape), parameter=owner)
    matrices = {name: weight for name, weight in odd.items() if infos[name].shape != ()}
    if matrices and kind in _LIKE_PARAMETER:
        raise _MisfitError(
            *(
                f"shape       {name}  is {list(infos[name].shape)}, its parameter {list(names.shapes[weight])}"
                for name, weight in matrices.items()
            )
        )
    if (matrices or infos[first].shape) and not isinstance(expression, Source):
        raise _MisfitError(
            *(f"rows        {name}  {list(info.shape)}: its permutation is unknown" for name, info in infos.items())
        )
    differing = [
        name for name in rest if infos[name] != infos[first] or first_differing_block(reader, first, reader, name)
    ]
    _require_equal(differing, first, owner)
    return MadeTensor(Source(first), infos[first])


def _plan_value(reader: CatalogReader, parts: Sequence[str], target: str, *, keep: bool) -> Entry:
    """A state that is not a tensor: old versions of torch count steps in plain numbers, new ones in tensors.

    `keep`: copy its bytes; else make a tensor of it.
    """
    first, *others = parts
    if any(name in reader.tensors for name in parts):
        raise _MisfitError(f"value       {first}  and others of {target} are tensors and plain values")
    _require_equal([name for name in others if reader.read_blob(name) != reader.read_blob(first)], first, target)
    if keep:
        return CopiedValue(first)
    value = read_blob_item(reader.read_blob(first), what=first)
    if type(value) not in (int, float):
        raise _MisfitError(f"value       {first}  is {value!r:.40}, not a number of steps")
    return Number(np.array(value, np.float32))


def _require_equal(differing: Sequence[str], first: str, target: str) -> None:
    if differing:
        text = f"has another value than {first}, and {target} needs one for both"
        raise _MisfitError(*(f"differs     {name}  {text}" for name in differing))


def _second_problems(reader: CatalogReader, first: Entry | None, name: str) -> list[str]:
    """What is wrong with a second state of a tied weight, which must be equal to the first bit for bit."""
    if not isinstance(first, MadeTensor) or reader.tensors.get(name) != reader.tensors[first.expression.sources[0]]:
        return [f"tied        {name}: the embedding has no such state"]
    source = first.expression.sources[0]
    if first_differing_block(reader, source, reader, name):
        return [f"tied        {name}: differs from {source}, but the model is tied"]
    return []


def _lacking(kinds: set[str], others: Iterable[set[str]]) -> list[str]:
    """Kinds of state that another parameter has in addition to these; `*` where this one has none."""
    if not kinds:
        return ["*"]
    return sorted(set().union(*(other for other in others if kinds < other)) - kinds)


def _plan_groups(
    reader: CatalogReader, names: ParameterNames, listed: Sequence[str]
) -> tuple[dict[str, Entry], dict[str, str]]:
    """The settings to write by name, and those that are dropped with the reason."""
    if names.are_native:  # in any style: the bytes need no change
        return {name: _unchanged(reader, name) for name in listed}, {}
    entries: dict[str, Entry] = {}
    dropped: dict[str, str] = {}
    problems: list[str] = []
    members = _group_members(reader, names, listed, problems.append)
    for name in listed:
        rest = name.removeprefix(GROUPS)
        number, _, key = rest.partition(".")
        owners: Sequence[str] = members.get(number, ())
        if not number.isdecimal():
            owners, _, key = _owners(rest, names)
            if names.tied and owners == (OUTPUT,):
                dropped[name] = TIED_SETTING
                continue
            if not owners:
                problems.append(f"unexpected  {name}")
                continue
        if key in _ABOUT_PARAMETERS:
            dropped[name] = "each setting names its parameter"
            continue
        entry: Entry = CopiedValue(name)
        if name in reader.tensors:  # a learning rate may be a tensor, for torch.compile
            info = reader.tensors[name]
            if not is_number(info):
                problems.append(f"value       {name}  is {info.dtype} {list(info.shape)}, not a setting")
                continue
            entry = NewValue(number_item(reader, name))
        for owner in owners:
            first = entries.setdefault(f"{GROUPS}{owner}.{key}", entry)
            if first is entry:
                continue
            if len(names.expressions[owner].sources) == 1:
                problems.append(f"twice       {name}  is a repeated setting of {owner}")
            elif not _is_same_value(reader, first, entry):
                problems.append(f"differs     {name}  has another value than other parts of {owner}")
    if problems:
        raise _MisfitError(*problems)
    return entries, dropped


def _is_same_value(reader: CatalogReader, first: Entry, second: Entry) -> bool:
    if isinstance(first, CopiedValue) and isinstance(second, CopiedValue):
        return reader.read_blob(first.name) == reader.read_blob(second.name)
    return first == second


def _group_members(
    reader: CatalogReader, names: ParameterNames, entries: Sequence[str], complain: Callable[[str], Any]
) -> dict[str, list[str]]:
    """Group number → native names of its parameters, from the lists that the groups hold."""
    members: dict[str, list[str]] = {}
    for name in entries:
        number, _, key = name.removeprefix(GROUPS).partition(".")
        if not number.isdecimal() or key != "params":
            continue
        listed = reader.read_value(name) if name in reader.catalog.values else None
        if not isinstance(listed, list | tuple):
            complain(f"value       {name}  is not a list of parameters")
            continue
        strangers = [str(spelled) for spelled in listed if not (type(spelled) is str and spelled in names.spelled)]
        if strangers:
            complain(f"unexpected  {name}  lists {', '.join(strangers[:3])}{', …' if len(strangers) > 3 else ''}")
        found = [names.spelled[spelled] for spelled in listed if type(spelled) is str and spelled in names.spelled]
        owners = dict.fromkeys(owner for weight in found for owner in names.natives[weight])
        members[number] = [owner for owner in owners if not (names.tied and owner == OUTPUT)]
    return members


def _unchanged(reader: CatalogReader, name: str) -> Entry:
    """An entry of the checkpoint, as it is."""
    return MadeTensor(Source(name), reader.tensors[name]) if name in reader.tensors else CopiedValue(name)


def _misfit(problems: list[str], *, numbered: bool) -> CheckpointError:
    found = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return CheckpointError(
        f"the optimizer state does not match the model, {found}:" + list_offenders(sorted(problems)),
        hint="its states are numbered: save what torch's get_optimizer_state_dict returns, which names them"
        if numbered
        else "",
        tries=[
            f"--drop {OPTIMIZER}, to continue without it",
            *(
                ["--allow-missing, where parameters were frozen"]
                if any(p.startswith("missing") for p in problems)
                else []
            ),
        ],
    )


class WithNumbers:
    """A TensorSource with additional 0-dim tensors in memory."""

    identity = "WithNumbers"  # the numbers themselves are read from the source

    def __init__(self, source: TensorSource, numbers: Mapping[str, np.ndarray]):
        self.source = source
        self.tensors = dict(source.tensors) | {n: TensorInfo(v.dtype.name, v.shape) for n, v in numbers.items()}
        self._numbers = numbers

    def read(self, fqn: str, box: Box) -> np.ndarray[Any, Any]:
        return self._numbers[fqn] if fqn in self._numbers else self.source.read(fqn, box)


def is_number(info: TensorInfo) -> bool:
    """Whether a tensor is one real number."""
    return info.shape == () and (DTYPES[info.dtype].is_floating or "int" in info.dtype)


def number_item(source: TensorSource, name: str) -> bytes:
    """The item of a 0-dim tensor's number, as a plain int or float."""
    value = source.read(name, Box((), ()))
    return blob_item(float(value) if DTYPES[source.tensors[name].dtype].is_floating else int(value))
