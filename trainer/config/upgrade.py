"""Upgrade an older TOML file to the current keys, statement by statement; everything else keeps its bytes and order.

Torch-free. The old names are in `renamed.py`; values that changed their meaning are converted here.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import ConfigError
from converters.families.registry import all_families
from converters.store.replace_file import replacing
from trainer.config.load import is_known, is_older, problem_of
from trainer.config.refused import REFUSED_EXTENSIONS
from trainer.config.renamed import CHANGED_DEFAULTS, GONE, RENAMED, RENAMED_VALUES
from trainer.config.show import toml_text
from trainer.config.toml_file import Setting, read_text, read_toml
from trainer.config.toml_lines import Line, flatten, moved, read_lines, renamed, revalued, without_empty_sections

_CONVERTERS, _FLOAT8 = "model.converters", "quantize.linear.float8"
_PARALLELISM = "parallelism."


@dataclass(frozen=True, slots=True)
class Upgrade:
    """`changes` and `notes` are messages; with `problems`, which could not be converted, `text` is invalid.

    `refused` are current settings that titan does not support.
    """

    text: str
    data: bytes  # of the file to write: the source's own if nothing changed
    changes: list[str]
    notes: list[str]
    problems: list[str]
    refused: list[str]


class _CannotTranslate(Exception):
    """With the reason as its message."""


def upgrade(path: Path) -> Upgrade:
    """The file with current keys. Raises ConfigError if it is not valid TOML."""
    read_toml(path)  # raises for syntax errors, with line and column
    text = read_text(path)
    has_end = text.endswith("\n")
    lines = read_lines(text if has_end else text + "\n")  # lines are compared by identity: end the last one now
    changes: list[str] = []
    problems: list[str] = []
    values = {key: value for line in lines for key, value in line.values.items()}
    touched: set[str] = set()
    for line in list(lines):
        where = f"{path}:{line.number}"
        old = [key for key in line.values if is_older(key, line.values[key]) or _is_idle_torchft(key, values)]
        if not old:
            continue
        if not line.key:
            problems.append(f"{where}: {', '.join(old)}: write this inline table as a section of its own")
            continue
        try:
            lines, change = _translate(lines, line, values)
        except _CannotTranslate as reason:
            problems.append(f"{where}: {line.key} = {_short(line.values[line.key])}: {reason}")
            continue
        touched.add(line.section)
        changes.append(f"{where}: {change}")
    upgraded = "".join(line.text for line in without_empty_sections(lines, touched)) if changes else text
    upgraded = upgraded if has_end or not changes else upgraded.removesuffix("\n")
    notes: list[str] = []
    refused: list[str] = []
    if not problems:
        problems, refused = _what_is_left(upgraded, path)
    if changes:
        new_keys = {key for line in lines for key in line.values}
        notes = [f"{key} is not set: {why}" for key, why in CHANGED_DEFAULTS.items() if key not in new_keys]
    source = path.read_bytes()
    newline = "\r\n" if b"\r\n" in source else "\n"
    data = upgraded.replace("\n", newline).encode() if changes else source
    return Upgrade(upgraded, data, changes, notes, problems, refused)


def _translate(lines: list[Line], line: Line, values: Mapping[str, Any]) -> tuple[list[Line], str]:
    """The lines with this one upgraded, and a description of the change. Raises _CannotTranslate."""
    old, value = line.key, line.values[line.key]
    if _is_idle_torchft(old, values):
        return _without(lines, line), f"{old} is left out: it is read only with fault_tolerance.enable"
    if old in GONE:
        harmless, reason = GONE[old]
        if harmless is not None and value not in harmless:
            raise _CannotTranslate(reason)
        return _without(lines, line), f"{old} is left out: {reason}"
    key = RENAMED.get(old, old)
    if old in _TRANSLATED:
        value = _TRANSLATED[old](value, values)
    value = _new_values(key, value)
    if key == _CONVERTERS and old != _CONVERTERS:
        return _with_converter(lines, line, value)
    if value is None:
        return _without(lines, line), f"{old} is left out: it is what {key} is by default"
    if key != old and key in values:
        raise _CannotTranslate(f"is called {key} now, which the file sets as well, to {_short(values[key])}")
    new = revalued(line, value, _value_text(value)) if value != line.values[old] else line
    lines = [new if other is line else other for other in lines]
    before = f"{old} = {_short(line.values[old])}" if value != line.values[old] else old
    now = f"{key} = {_short(value)}" if value != line.values[old] else key
    if key == old:
        return lines, f"{before} is {_short(value)} now"
    if not line.section or key.rpartition(".")[0] == line.section:
        return [renamed(new, key) if other is new else other for other in lines], f"{before} is called {now} now"
    return moved(lines, new, key), f"{before} is {now} now, in its own section"


def _is_idle_torchft(key: str, values: Mapping[str, Any]) -> bool:
    """Settings of TorchFT, which is an extension now, in a file that does not enable it."""
    is_its = key.startswith(tuple(REFUSED_EXTENSIONS)) and key.startswith("fault_tolerance.")
    return is_its and values.get("fault_tolerance.enable") is not True


def _without(lines: list[Line], line: Line) -> list[Line]:
    return [other for other in lines if other is not line]


def _new_values(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_new_values(key, item) for item in value]
    return RENAMED_VALUES.get((key, value), value) if isinstance(value, str) else value


def _value_text(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, list) for item in value):  # one pipeline stage a line
        return "[\n" + "".join(f"    {_value_text(item)},\n" for item in value) + "]"
    return f"[{', '.join(map(_value_text, value))}]" if isinstance(value, list) else toml_text(value)


def _short(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return f"[{', '.join(f'[{_short(i[0])} … {_short(i[-1])}]' for i in value)}]"
    return _value_text(value)


def _with_converter(lines: list[Line], line: Line, wanted: bool) -> tuple[list[Line], str]:
    """Replace an old boolean key by an entry of model.converters."""
    if not wanted:
        return _without(lines, line), f"{line.key} = false is left out: a converter is on where {_CONVERTERS} names it"
    change = f'{line.key} = true is {_CONVERTERS} = ["{_FLOAT8}"] now'
    there = next((other for other in lines if other.key == _CONVERTERS), None)
    if there is None:
        new = revalued(line, [_FLOAT8], _value_text([_FLOAT8]))
        lines = [new if other is line else other for other in lines]
        if not new.section:
            return [renamed(new, _CONVERTERS) if other is new else other for other in lines], change
        return moved(lines, new, _CONVERTERS), change
    names = _new_values(_CONVERTERS, there.values[_CONVERTERS])
    names = names if _FLOAT8 in names else [*names, _FLOAT8]
    new = revalued(there, names, _value_text(names))
    return [new if other is there else other for other in lines if other is not line], change


# Values that change with their key: (old value, all values of the file) → new value; None: leave the key out


def _opposite(value: Any, values: Mapping[str, Any]) -> bool:
    if not isinstance(value, bool):
        raise _CannotTranslate("must be true or false")
    return not value


def _as_bool(value: Any, values: Mapping[str, Any]) -> bool:
    if not isinstance(value, bool):
        raise _CannotTranslate("must be true or false")
    return value


def _implementation(value: Any, values: Mapping[str, Any]) -> str:
    return "fused" if _as_bool(value, values) else "foreach"


def _folder_of_tokenizer(value: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or not value:
        return None
    path = Path(value)
    folder = str(path.parent if path.suffix in (".model", ".json") else path)
    return folder if folder == "." or path.is_absolute() or not value.startswith("./") else f"./{folder}"


def _microbatch_size(value: Any, values: Mapping[str, Any]) -> int:
    batch = values.get("training.local_batch_size", values.get("training.batch_size", 8))
    if not isinstance(value, int) or not isinstance(batch, int) or value < 1 or batch % value:
        raise _CannotTranslate(
            f"{_PARALLELISM}pipeline_parallel_microbatch_size counts samples now, and {value} microbatches"
            f" do not share out a local batch of {batch}"
        )
    return batch // value


def _model_parts(value: Any, values: Mapping[str, Any]) -> list[list[str]] | None:
    """Convert the first modules of stages to the module lists of stages, which needs the number of layers."""
    points = [p.strip() for p in value.split(",")] if isinstance(value, str) else value
    if not points or points == [""]:
        return None
    if not isinstance(points, list):
        raise _CannotTranslate("must be a list of modules")
    name, flavor = values.get("model.name", "llama3"), values.get("model.flavor", "debugmodel")
    family = all_families().get(str(name))
    if family is None or str(flavor) not in family.flavors:
        raise _CannotTranslate(f"the stages' modules are written out now, and {name} {flavor} is no model known here")
    modules = family.units(family.flavors[flavor])
    unknown = [point for point in points if point not in modules]
    if unknown:
        raise _CannotTranslate(f"{name} {flavor} has no {', '.join(map(str, unknown))}")
    begins = [0, *(modules.index(point) for point in points), len(modules)]
    if begins != sorted(set(begins)):
        raise _CannotTranslate("the stages do not begin one after another")
    return [modules[begin:end] for begin, end in zip(begins, begins[1:], strict=False)]


def _schedule(value: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value  # reported when the value is checked
    return RENAMED_VALUES.get((_PARALLELISM + "pipeline_parallel_schedule", value.lower()), value)


_TRANSLATED: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "optimizer.fused": _implementation,
    "metrics.rank_0_only": _opposite,
    "metrics.enable_color_printing": _opposite,
    "training.enable_float8_linear": _as_bool,
    "float8.enable_float8_linear": _as_bool,
    "mx.use_fp8_dim1_cast_triton_kernel": lambda value, values: "triton" if _as_bool(value, values) else "torch",
    "model.tokenizer_path": _folder_of_tokenizer,
    "experimental.pipeline_parallel_microbatches": _microbatch_size,
    "parallelism.pipeline_parallel_microbatches": _microbatch_size,
    "experimental.pipeline_parallel_split_points": _model_parts,
    "parallelism.pipeline_parallel_split_points": _model_parts,
    "experimental.pipeline_parallel_schedule": _schedule,
}


def _what_is_left(text: str, path: Path) -> tuple[list[str], list[str]]:
    """Unknown keys, and current keys or values that titan does not support."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return [f"{path}: the upgraded file would not be valid TOML ({error}): write its dotted keys as sections"], []
    unknown: list[str] = []
    refused: list[str] = []
    for key, value in flatten(tables).items():
        problem = problem_of(key, Setting(value, str(path)))
        if problem:
            (refused if is_known(key) else unknown).append(f"{path}: {problem}")
    return unknown, refused


def write_upgraded(upgraded: Upgrade, out: Path, *, replace: bool) -> None:
    """Write the new text; an existing file is replaced only with `replace`."""
    try:
        if replace:
            with replacing(out) as temporary:
                temporary.write_bytes(upgraded.data)
        else:
            with out.open("xb") as file:
                file.write(upgraded.data)
    except FileExistsError:
        raise ConfigError(f"{out} exists already", tries=["another name", "--in-place"]) from None
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from None
