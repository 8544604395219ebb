"""Words of a command line around CONFIG that belong elsewhere: torchtitan's --job.config_file, options of others."""

import difflib
import shlex
from collections.abc import Iterator
from typing import Any

import typer

from converters.common.errors import ConfigError

_SIMILAR = 0.75  # --batch-size, a key, is 0.58 like --world-size
_CONFIG_FILE = "job.config_file"  # torchtitan's way to name the config


def check_words(context: typer.Context, config: str) -> None:
    """Raise ConfigError for an option in the place of CONFIG or OUT, of another command, or misspelt.

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
        if commands := [path for path, has in _options_beside_config(context) if option in has]:
            raise ConfigError(
                f"{command} has no option {option}",
                tries=[f"{each} CONFIG {option}" for each in commands],
            )
        if "." not in option and (near := difflib.get_close_matches(option, _options(context.command), 1, _SIMILAR)):
            raise ConfigError(f"{command} has no option {option}; did you mean {near[0]}?")
    out = [str(context.params["out"])] if "out" in context.params else []  # of `titan seed`
    if name.startswith("--"):
        raise ConfigError(
            f"the config comes before the overrides, but {config!r} came first",
            tries=[f"{command} CONFIG {shlex.join([config, *out, *context.args])}"],
        )
    if out and out[0].startswith("--"):
        _check_missing_out(command, config, [*out, *context.args])


def _check_missing_out(command: str, config: str, words: list[str]) -> None:
    """Raise ConfigError: `words` begin with an override, which stands in the place of OUT."""
    from trainer.config.load import load_config

    values = [n for n, word in enumerate(words) if not word.startswith("--")]
    after_values = [n for n in values if n - 1 in values or "=" in words[n - 1]]
    if after_values:
        out = words.pop(after_values[0])
        raise ConfigError(
            f"OUT comes before the overrides, but {words[0]!r} came first",
            tries=[f"{command} {shlex.join([config, out, *words])}"],
        )
    load_config(config, words)  # whose errors come first
    raise ConfigError(
        f"OUT is missing: {words[0]!r} stands in its place", tries=[f"{command} {config} OUT {shlex.join(words)}"]
    )


def _options_beside_config(context: typer.Context) -> Iterator[tuple[str, set[str]]]:
    """Each command that takes a CONFIG, with its options."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, set[str]]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(f"{path} {name}", inner)
        if any(parameter.name == "config" for parameter in command.params):
            yield path, _options(command)

    root = context.find_root()
    yield from walk(str(root.info_name), root.command)


def _options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
