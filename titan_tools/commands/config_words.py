"""Words of a command line around CONFIG that belong elsewhere: torchtitan's --job.config_file, options of others."""

import shlex
from collections.abc import Iterator
from typing import Any

import typer

from converters.errors import ConfigError

_CONFIG_FILE = "job.config_file"  # torchtitan's way to name the config


def check_words(context: typer.Context, config: str) -> None:
    """Raise ConfigError where an option stands in the place of CONFIG, or is one of another command with a CONFIG.

    Other unknown words are left to `load_config`, which knows the keys.
    """
    command = context.command_path
    name, _, file = config.partition("=")
    if name.startswith("--") and name[2:].replace("-", "_") == _CONFIG_FILE:
        words = [*context.args]
        # its value is the next positional: the second argument of `titan seed`
        file = file or str(context.params.get("out") or "") or (words.pop(0) if words else "")
        raise ConfigError(
            f"--{_CONFIG_FILE}: the config is an argument here, not a key",
            tries=[f"{command} {shlex.join([file or 'CONFIG', *words])}"],
        )
    options = [config, *context.args] if name.startswith("--") else context.args
    for option in (word.partition("=")[0] for word in options if word.startswith("--")):
        if others := [path for path, has in _options_beside_config(context) if option in has]:
            raise ConfigError(
                f"{command} has no option {option}", tries=[f"{other} CONFIG {option}" for other in others]
            )
    if name.startswith("--"):
        raise ConfigError(
            f"the config comes before the overrides, but {config!r} came first",
            tries=[f"{command} CONFIG {shlex.join([config, *context.args])}"],
        )


def _options_beside_config(context: typer.Context) -> Iterator[tuple[str, set[str]]]:
    """Each command that takes a CONFIG, with its options."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, set[str]]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(f"{path} {name}", inner)
        if any(parameter.name == "config" for parameter in command.params):
            yield path, {option for parameter in command.params for option in parameter.opts}

    root = context.find_root()
    yield from walk(str(root.info_name), root.command)
