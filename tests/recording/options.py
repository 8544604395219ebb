"""Every command with its arguments and options, as Typer knows them: names, order, types, choices, defaults."""

from enum import Enum
from pathlib import Path
from typing import Any


def record_options() -> dict[str, Any]:
    """Command path → what its command line may hold. Help texts and metavars are wording and left out."""
    import typer

    from titan_tools.cli import app

    found: dict[str, Any] = {}

    def visit(command: Any, path: str) -> None:
        found[path] = {
            "arguments": [_parameter(each) for each in command.params if each.param_type_name == "argument"],
            "options": {
                " ".join([*each.opts, *each.secondary_opts]): _parameter(each)
                for each in sorted(command.params, key=lambda each: each.opts)
                if each.param_type_name == "option"
            },
            "takes_other_arguments": bool(command.context_settings.get("allow_extra_args")),
            "takes_unknown_options": bool(command.context_settings.get("ignore_unknown_options")),
            "help_options": list(command.context_settings.get("help_option_names", ())),
            "hidden": bool(command.hidden),
        }
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            visit(inner, f"{path} {name}")

    visit(typer.main.get_command(app), "titan")
    return found


def _parameter(parameter: Any) -> dict[str, Any]:
    kind = parameter.type_descriptor.annotation
    is_choice = isinstance(kind, type) and issubclass(kind, Enum)
    output = {
        **({"name": parameter.name} if parameter.param_type_name == "argument" else {}),
        "required": parameter.required,
        "type": "choice" if is_choice else getattr(kind, "__name__", str(kind)),
        "default": _plain(parameter.default),
    }
    other = {
        "choices": [choice.value for choice in kind] if is_choice else [],
        "min": parameter.min,
        "max": parameter.max,
        "nargs": None if parameter.nargs == 1 else parameter.nargs,
        "multiple": getattr(parameter, "multiple", False),
        "flag": getattr(parameter, "is_flag", False),
        "hidden": getattr(parameter, "hidden", False),
        "environment": parameter.envvar,
    }
    return output | {key: value for key, value in other.items() if value not in (None, False, [])}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
