"""A checkpoint under native names, after a ledger has assigned every tensor; errors list all that do not match."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from converters.common.box import TensorInfo, TensorSource
from converters.common.dtypes import DTYPES
from converters.common.errors import CheckpointError, list_offenders
from converters.families import rules
from converters.families.args import ModelArgs, is_tied
from converters.families.base import Family, Naming
from converters.families.parameters import EMBEDDING, OUTPUT, Parameter
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.model.multimodal import EXTRA_REASON
from converters.naming.namings import any_name, drop_reason, is_named, prefix, rules_for, with_placeholder
from converters.naming.rule_expressions import ForeignTensors, foreign_tensors, native_expression
from converters.quantized.mxfp4_scheme import ENDS
from converters.quantized.quantization import KEY, SCALE
from converters.quantized.quantized_tensors import QuantizedTensors
from converters.views.compare import first_difference
from converters.views.expressions import Expression, Source
from converters.views.view import NOT_SAVED_REASON, REPEATED_REASON, TIED_REASON, Ledger, View

DEQUANTIZED = "bfloat16"  # the type that published checkpoints were quantized from
_SCALE_ENDS = (SCALE, *ENDS.values())


@dataclass(frozen=True, slots=True)
class Reading:
    """What of the weights is read, and what may be missing or extra: then it is in the ledger, not in the view.

    `keep_mtp`: with layers for multi-token prediction, if there are any; else the ledger has dropped them.
    `keep_extra`: likewise with the tensors of a multimodal checkpoint beside its text model, under their own names;
    None: if the checkpoint has native names. `reads_copies`: compare tensors that are stored twice, as the output of a
    tied model; else nothing but headers is read. `dequantized`: the type of values that are
    stored as codes with scales.
    """

    allow_missing: bool = False
    allow_extra: bool = False
    keep_mtp: bool = False
    keep_extra: bool | None = False
    reads_copies: bool = True
    dequantized: str = DEQUANTIZED


READING = Reading()


def native_view(
    source: TensorSource,
    info: ModelInfo,
    naming: Naming,
    reading: Reading = READING,
    *,
    quantized: QuantizedTensors | None = None,
    where: str = "",
) -> View:
    """`source` under native names; `quantized`: its weights whose values are codes times scales.

    Raises CheckpointError with all offenders: unknown, missing, misshapen or non-floating tensors, parts of one
    tensor that differ in dtype, and quantized weights that do not match their scales. A tensor of which only some parts
    are there is an error in any case. A tied model may repeat its output weight, which is read, and dropped if it
    equals the embedding. `where` begins the messages.
    """
    family, args = get_family(info.family), info.args
    naming, parameters = family.naming_for(naming, args), family.parameters(args)
    outputs = [replace(p, fqn=OUTPUT) for p in parameters if p.fqn == EMBEDDING and is_tied(args)]
    by_native = rules_for((p.fqn for p in (*parameters, *outputs)), naming)
    rule_of = {p.fqn: by_native[with_placeholder(p.fqn)] for p in (*parameters, *outputs)}
    foreign_of = {p.fqn: foreign_tensors(rule_of[p.fqn], p) for p in (*parameters, *outputs)}
    ledger = Ledger()
    extras = family.multimodal.extras if family.multimodal else ()
    tied_names = {name for p in outputs for name in foreign_of[p.fqn].names}
    names = _Names({name for foreign in foreign_of.values() for name in foreign.names}, tied_names, naming, extras)
    stored, kept_extras, tied_copy = _assign_names(
        source, ledger, names, quantized.scales if quantized else {}, keep_extra=bool(reading.keep_extra)
    )
    if tied_copy is not None and not stored.intersection(foreign_of[EMBEDDING].names):
        # the tied weight, under its other name
        foreign_of[EMBEDDING] = replace(foreign_of[EMBEDDING], names=(tied_copy,))
        stored.add(tied_copy)
        tied_copy = None
    not_saved = set() if naming.has_buffers else _not_saved(parameters, foreign_of, stored)
    natives = _NativeTensors(source, args, ledger, quantized, reading.allow_missing)
    for parameter in parameters:
        op, foreign = rule_of[parameter.fqn].op, foreign_of[parameter.fqn]
        if parameter.fqn in not_saved and not isinstance(op, rules.Zeros):
            op = rules.Zeros(NOT_SAVED_REASON)
        natives.add(parameter, op, foreign, stored)
    for name in kept_extras:
        natives.put(name, Source(name), source.tensors[name])
    ledger.missing = list(dict.fromkeys(ledger.missing))
    problems = [*natives.problems, *_left_over(source, ledger, quantized, allow_extra=reading.allow_extra)]
    if problems:
        no_output = None if is_tied(args) or OUTPUT in ledger.used else foreign_of[OUTPUT]
        raise _ledger_error(list(dict.fromkeys(problems)), family, naming, ledger.extra, no_output, where=where)
    if tied_copy is not None:
        if reading.reads_copies:
            _require_equal(source, ledger.used[EMBEDDING][0], tied_copy, where=where)
        ledger.dropped[tied_copy] = TIED_REASON
    return View(source, natives.tensors, natives.expressions, ledger)


@dataclass(slots=True)
class _NativeTensors:
    """The native tensors of a view, as they are added, and every problem."""

    source: TensorSource
    args: ModelArgs
    ledger: Ledger
    quantized: QuantizedTensors | None
    allow_missing: bool
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    expressions: dict[str, Expression] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, name: str, expression: Expression, info: TensorInfo) -> None:
        """Add a tensor of the view."""
        self.expressions[name], self.tensors[name], self.ledger.used[name] = expression, info, expression.sources

    def add(self, parameter: Parameter, op: rules.Op, foreign: ForeignTensors, stored: set[str]) -> None:
        """Make a parameter of its foreign tensors, or record why it cannot be made."""
        fqn = parameter.fqn
        if isinstance(op, rules.Zeros):
            self.ledger.made[fqn] = op.reason
            foreign = replace(foreign, names=())
        absent = [name for name in foreign.names if name not in stored]
        if absent:
            self.ledger.missing += absent
            if not self.allow_missing:
                self.problems += [_missing(name, foreign) for name in absent]
            elif len(absent) < len(foreign.names):
                why = f"only all parts of {fqn} together may be missing"
                self.problems += [f"{_missing(name, foreign)}: {why}" for name in absent]
        present = {name: self.source.tensors[name] for name in foreign.names if name in stored}
        values = self.quantized.expressions if self.quantized else {}
        if self.quantized:
            if not self.quantized.scheme.covers(parameter):
                uncovered = self.quantized.scheme.uncovered
                self.problems += [f"quantized   {name}  {uncovered}" for name in present if name in values]
            present = {name: self.quantized.native_info(name, info) for name, info in present.items()}
        self.problems += _part_problems(present, foreign.shape)
        if not absent:
            parts = tuple(values.get(name) or Source(name) for name in foreign.names)
            dtype = present[foreign.names[0]].dtype if present else "float32"
            info = TensorInfo(dtype, parameter.shape)
            self.put(fqn, native_expression(op, parameter, parts, self.args), info)


def _left_over(
    source: TensorSource, ledger: Ledger, quantized: QuantizedTensors | None, *, allow_extra: bool
) -> list[str]:
    """Problems of codes, scales and names that no parameter is made of. Fills in the scales of the ledger."""
    problems = []
    if quantized:
        ledger.scales = {name for names in ledger.used.values() for name in names if name in quantized.scales}
        gone, weight_of = {*ledger.dropped, *ledger.extra}, quantized.scheme.weight_of
        problems += [text for name, text in quantized.problems.items() if gone.isdisjoint((name, weight_of(name)))]
    if not allow_extra:
        problems += [f"unexpected  {name}" for name in ledger.extra]
    elif not quantized:
        scaled = {name: _scaled_by(name, source.tensors) for name in ledger.extra}
        problems += [f"unexpected  {name}: scales of {weight}" for name, weight in scaled.items() if weight]
    return problems


@dataclass(frozen=True, slots=True)
class _Names:
    """The names that a model's tensors have in a source."""

    of_model: set[str]
    of_tied_output: set[str]
    naming: Naming
    extras: Sequence[str]  # patterns of names beside a text model


def _assign_names(
    source: TensorSource, ledger: Ledger, names: _Names, scales: Mapping[str, str], *, keep_extra: bool
) -> tuple[set[str], list[str], str | None]:
    """The names of the model's tensors, of those beside it that are kept, and of the output that a tied model repeats.

    All others go to the ledger. `scales`: name → the weight that they belong to.
    """
    repeats = {rule.foreign: rule.native for rule in names.naming.repeats}
    stored, kept_extras, tied_copy = set[str](), list[str](), None
    for name in source.tensors:
        if name in scales:
            continue
        if name in names.of_tied_output:
            tied_copy = name
        elif name in names.of_model:
            stored.add(name)
        elif name in repeats:
            ledger.repeated[name] = repeats[name]
            ledger.dropped[name] = REPEATED_REASON + repeats[name]
        elif is_named(name, names.extras):
            if keep_extra:
                kept_extras.append(name)
            else:
                ledger.dropped[name] = EXTRA_REASON
        elif reason := drop_reason(name, names.naming):
            ledger.dropped[name] = reason
        else:
            ledger.extra.append(name)
    unknown = set(ledger.extra)
    for name, weight in scales.items():  # what happens to a weight happens to its scales
        if reason := drop_reason(weight, names.naming):
            ledger.dropped[name] = reason
        elif weight in unknown:
            ledger.extra.append(name)
    return stored, kept_extras, tied_copy


def _missing(name: str, foreign: ForeignTensors) -> str:
    return f"missing     {name}  {list(foreign.shape)}"


def _not_saved(parameters: Sequence[Parameter], foreign_of: Mapping[str, ForeignTensors], stored: set[str]) -> set[str]:
    """The buffers that training changes, if the source has none: then there is nothing to lose, they are zero."""
    buffers = [p.fqn for p in parameters if not p.is_trained]
    return set(buffers) if stored.isdisjoint(n for fqn in buffers for n in foreign_of[fqn].names) else set()


def _scaled_by(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    """The float8 weight that a tensor of this name has the scales of; "" for others."""
    ends = {SCALE: "", "_scale": "", ".scale": ".weight"}  # the last: in DeepSeek's own names
    weights = (name.removesuffix(end) + instead for end, instead in ends.items() if name.endswith(end))
    return next((n for n in weights if n in tensors and tensors[n].dtype.startswith("float8")), "")


def _part_problems(parts: Mapping[str, TensorInfo], shape: tuple[int, ...]) -> list[str]:
    """Problems of the foreign tensors that make one native tensor."""
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


def _require_equal(source: TensorSource, embedding: str, output: str, *, where: str) -> None:
    """Raise CheckpointError unless two tensors hold the same bits."""
    if problem := first_difference(source, embedding, output):
        raise CheckpointError(
            f"{prefix(where)}the model is tied, but {output} differs from {embedding}: {problem}",
            hint="dropping it would change the model; an untied model has tie_word_embeddings: false in config.json",
        )


def _ledger_error(
    problems: list[str],
    family: Family,
    naming: Naming,
    extra: Sequence[str],
    no_output: ForeignTensors | None,
    *,
    where: str,
) -> CheckpointError:
    """The error with all `problems`. `no_output`: the output weight, if an untied model lacks it."""
    if no_output and problems == [_missing(no_output.names[0], no_output)]:
        return CheckpointError(
            f"{prefix(where)}there is no output weight ({no_output.names[0]}): a base model was saved without its "
            "head, or the model is tied and its config does not say so",
            hint="transformers would compute with random values there; save the model with its head, or set "
            "tie_word_embeddings: true in config.json if it is tied",
            tries=["--allow-missing, for a conversion without it"],
        )
    hints = [f"names were read as {naming.name!r}"]
    if no_output:
        hints.append("the output weight is missing: a tied model has tie_word_embeddings: true in config.json")
    if any(name.endswith(_SCALE_ENDS) for name in extra):
        hints.append(f"scales of float8 and mxfp4 weights are read where config.json has a {KEY}")
    pattern = any_name(naming)
    unnamed = [name for name in extra if not pattern.fullmatch(name)]
    for candidate in family.namings.values():
        if any(any_name(candidate).fullmatch(name) for name in unnamed):
            hints.append(
                f"some of the unexpected names are those of {candidate.name!r}: one model, stored in two forms?"
            )
            break
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return CheckpointError(
        f"{prefix(where)}the tensors do not match the model, {count}:" + list_offenders(sorted(problems)),
        hint="; ".join(hints),
    )
