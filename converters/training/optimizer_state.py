"""Plan the optimizer of a training checkpoint: assign states to parameters, check them, translate their names.

Native names do not change. Other namings are translated: a state gets its parameter's native name and is made as its
parameter is (permuted, stacked, or one half of a tensor); settings of numbered groups are written for each parameter,
as in torch's `flatten_optimizer_state_dict` and in the trainer, because group numbers collide between pipeline stages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from converters.common.box import Box, TensorInfo, TensorSource
from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import OPTIMIZER
from converters.containers.dcp_item import blob_item, read_blob_item
from converters.engine.read import CatalogReader
from converters.families.base import EMBEDDING, OUTPUT, Parameter
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


@dataclass(slots=True)
class OptimizerPlan:
    """What to write for an optimizer, and from where."""

    tensors: dict[str, Expression] = field(default_factory=dict)  # name to write → how tensors make it
    infos: dict[str, TensorInfo] = field(default_factory=dict)  # of them
    numbers: dict[str, np.ndarray] = field(default_factory=dict)  # 0-dim tensors made of plain values
    moments: dict[str, list[str]] = field(default_factory=dict)  # parameter → names to write of states of its shape
    blobs: dict[str, str] = field(default_factory=dict)  # name to write → value whose bytes are copied
    items: dict[str, bytes] = field(default_factory=dict)  # name to write → finished item of a value that was a tensor
    dropped: dict[str, str] = field(default_factory=dict)  # the checkpoint's name → reason
    without_state: list[str] = field(default_factory=list)  # parameters that lack states, if that is allowed
    unknown: list[str] = field(default_factory=list)  # entries that are neither state nor setting; copied unchanged


def plan_optimizer(reader: CatalogReader, names: ParameterNames, *, allow_missing: bool = False) -> OptimizerPlan:
    """Plan the optimizer section of `reader`. Raises CheckpointError with everything that does not match the model.

    Parameters need not have the same kinds of state (Muon and AdamW), but one with a subset of another's kinds lacks
    some, unless `allow_missing`. Numbered states (`state.0.…`) are refused: their parameters are unknown.
    """
    plan, problems = OptimizerPlan(), []
    shapes = {p.fqn: p.shape for p in names.parameters if p.is_trained}
    kinds_of: dict[str, set[str]] = {fqn: set() for fqn in shapes}
    states: dict[tuple[str, str], str] = {}  # (weight, kind) → entry
    second: list[
        tuple[str, str]
    ] = []  # (name to write, tensor) of a tied model's output, in addition to the embedding's
    entries = [n for n in (*reader.catalog.tensors, *reader.catalog.blobs) if n.startswith(f"{OPTIMIZER}.")]
    for name in entries:
        if name.startswith(GROUPS):
            continue
        if not name.startswith(STATE):
            plan.unknown.append(name)
            _keep(plan, reader, name)
            continue
        owners, weight, kind = _owners(name.removeprefix(STATE), names)
        if names.tied and owners == (OUTPUT,):
            second.append((f"{STATE}{EMBEDDING}.{kind}", name))
        elif not owners or not shapes.keys() >= set(owners):
            problems.append(f"unexpected  {name}")
        elif (other := states.setdefault((weight, kind), name)) != name:
            problems.append(f"twice       {name}  and {other} are one state of one parameter")
    elementwise = _elementwise_kinds(reader, names, states)
    for weight, kind in states:
        for owner in names.natives[weight]:
            if kind not in kinds_of[owner]:
                kinds_of[owner].add(kind)
                is_alike = kind in elementwise
                problems += _plan_state(plan, reader, names, states, owner, kind, shapes[owner], is_alike=is_alike)
    for target, name in second:
        problems += _plan_second(plan, reader, target, name)
    if any(kinds_of.values()):
        lacking = {fqn: found for fqn, kinds in kinds_of.items() if (found := _lacking(kinds, kinds_of.values()))}
        if allow_missing:
            plan.without_state += lacking
        else:
            problems += [f"missing     {STATE}{fqn}.{kind}" for fqn, found in lacking.items() for kind in found]
    problems += _plan_groups(plan, reader, names, [name for name in entries if name.startswith(GROUPS)])
    if problems:
        raise _misfit(problems, numbered=any(n.removeprefix(STATE)[:1].isdecimal() for n in entries))
    return plan


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
    plan: OptimizerPlan,
    reader: CatalogReader,
    names: ParameterNames,
    states: Mapping[tuple[str, str], str],
    owner: str,
    kind: str,
    shape: tuple[int, ...],
    *,
    is_alike: bool,
) -> list[str]:
    """Plan one state of a native parameter, from those of the weights that make it. `is_alike`: it is elementwise."""
    expression, target = names.expressions[owner], f"{STATE}{owner}.{kind}"
    lacking = [weight for weight in expression.sources if (weight, kind) not in states]
    if lacking:
        return [f"missing     {STATE}{weight}.{kind}" for weight in lacking]
    held = {weight: states[weight, kind] for weight in expression.sources}
    infos = {name: reader.tensors[name] for name in held.values() if name in reader.tensors}
    if len(infos) < len(held):
        return _plan_values(plan, reader, names, [*held.values()], target, kind)
    is_alike = is_alike or isinstance(expression, Source)
    if is_alike and all(infos[name].shape == names.shapes[weight] for weight, name in held.items()):
        plan.moments.setdefault(owner, []).append(target)
        plan.tensors[target] = expression.renamed(held.__getitem__)
        plan.infos[target] = TensorInfo(next(iter(infos.values())).dtype, shape)
        usual = plan.infos[target].dtype
        return [
            f"dtype       {name}  is {info.dtype}, the others that it is stacked with {usual}"
            for name, info in infos.items()
            if info.dtype != usual
        ]
    first, *others = held.values()
    other = {n: weight for weight, n in held.items() if infos[n].shape not in ((), names.shapes[weight])}
    if other and kind in _LIKE_PARAMETER:
        return [
            f"shape       {name}  is {list(infos[name].shape)}, its parameter {list(names.shapes[weight])}"
            for name, weight in other.items()
        ]
    if (other or infos[first].shape) and not isinstance(expression, Source):
        return [f"rows        {name}  {list(info.shape)}: its permutation is unknown" for name, info in infos.items()]
    plan.tensors[target], plan.infos[target] = Source(first), infos[first]
    return [
        f"differs     {name}  has another value than {first}, and {owner} needs one for both"
        for name in others
        if infos[name] != infos[first] or first_differing_block(reader, first, reader, name)
    ]


def _plan_values(
    plan: OptimizerPlan, reader: CatalogReader, names: ParameterNames, held: Sequence[str], target: str, kind: str
) -> list[str]:
    """Plan a state that is not a tensor: old versions of torch count steps in plain numbers, new ones in tensors."""
    name, *others = held
    if name in reader.tensors or any(other in reader.tensors for other in others):
        return [f"value       {name}  and others of {target} are tensors and plain values"]
    if names.are_native or kind != "step":
        plan.blobs[target] = name
    else:
        value = read_blob_item(reader.read_blob(name), what=name)
        if type(value) not in (int, float):
            return [f"value       {name}  is {value!r:.40}, not a number of steps"]
        plan.numbers[target] = np.array(value, np.float32)
    return [
        f"differs     {other}  has another value than {name}, and {target} needs one for both"
        for other in others
        if reader.read_blob(other) != reader.read_blob(name)
    ]


def _plan_second(plan: OptimizerPlan, reader: CatalogReader, target: str, name: str) -> list[str]:
    """Drop a second state of a tied weight, which must be equal bit for bit."""
    known = plan.tensors.get(target)
    if known is None or reader.tensors.get(name) != reader.tensors[known.sources[0]]:
        return [f"tied        {name}: the embedding has no such state"]
    if first_differing_block(reader, known.sources[0], reader, name):
        return [f"tied        {name}: differs from {known.sources[0]}, but the model is tied"]
    plan.dropped[name] = TIED_REASON
    return []


def _lacking(kinds: set[str], others: Iterable[set[str]]) -> list[str]:
    """Kinds of state that another parameter has in addition to these; `*` where this one has none."""
    if not kinds:
        return ["*"]
    return sorted(set().union(*(other for other in others if kinds < other)) - kinds)


def _plan_groups(
    plan: OptimizerPlan, reader: CatalogReader, names: ParameterNames, entries: Sequence[str]
) -> list[str]:
    if names.are_native:  # in any style: the bytes need no change
        for name in entries:
            _keep(plan, reader, name)
        return []
    problems: list[str] = []
    members = _group_members(reader, names, entries, problems.append)
    for name in entries:
        rest = name.removeprefix(GROUPS)
        number, _, key = rest.partition(".")
        owners: Sequence[str] = members.get(number, ())
        if not number.isdecimal():
            owners, _, key = _owners(rest, names)
            if names.tied and owners == (OUTPUT,):
                plan.dropped[name] = TIED_SETTING
                continue
            if not owners:
                problems.append(f"unexpected  {name}")
                continue
        if key in _ABOUT_PARAMETERS:
            plan.dropped[name] = "each setting names its parameter"
            continue
        made = None
        if name in reader.tensors:  # a learning rate may be a tensor, for torch.compile
            info = reader.tensors[name]
            if not is_number(info):
                problems.append(f"value       {name}  is {info.dtype} {list(info.shape)}, not a setting")
                continue
            made = number_item(reader, name)
        for owner in owners:
            target = f"{GROUPS}{owner}.{key}"
            if target in plan.blobs or target in plan.items:
                if len(names.expressions[owner].sources) == 1:
                    problems.append(f"twice       {name}  is a repeated setting of {owner}")
                elif made != plan.items.get(target) or (
                    made is None and reader.read_blob(name) != reader.read_blob(plan.blobs[target])
                ):
                    problems.append(f"differs     {name}  has another value than other parts of {owner}")
                continue
            if made is not None:
                plan.items[target] = made
            else:
                plan.blobs[target] = name
    return problems


def _group_members(
    reader: CatalogReader, names: ParameterNames, entries: Sequence[str], complain: Callable[[str], Any]
) -> dict[str, list[str]]:
    """Group number → native names of its parameters, from the lists that the groups hold."""
    members: dict[str, list[str]] = {}
    for name in entries:
        number, _, key = name.removeprefix(GROUPS).partition(".")
        if not number.isdecimal() or key != "params":
            continue
        listed = read_blob_item(reader.read_blob(name), what=name) if name in reader.catalog.blobs else None
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


def _keep(plan: OptimizerPlan, reader: CatalogReader, name: str) -> None:
    if name in reader.tensors:
        plan.tensors[name], plan.infos[name] = Source(name), reader.tensors[name]
    else:
        plan.blobs[name] = name


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
