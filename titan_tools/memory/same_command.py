"""The command as it was typed, with some settings of the config changed: what a refusal tells to try."""

import shlex
from collections.abc import Mapping, Sequence


def same_command(
    config: str, overrides: Sequence[str], *, flags: Mapping[str, object], changed: Mapping[str, str]
) -> str:
    """A line for the shell. `flags`: the command's own, left out where None or False; `changed`: keys → values."""
    words = ["titan", "estimate-memory", config]
    for flag, value in flags.items():
        if value is True:
            words.append(flag)
        elif value not in (None, False):
            words += [flag, str(value)]
    words += _without(overrides, changed)
    return shlex.join([*words, *(f"--{key}={value}" for key, value in changed.items())])


def _without(overrides: Sequence[str], keys: Mapping[str, str]) -> list[str]:
    """The overrides that are about other keys."""
    kept: list[str] = []
    is_kept = True
    for word in overrides:
        if word.startswith("--"):
            section, dot, name = word[2:].partition("=")[0].replace("-", "_").rpartition(".")
            is_kept = section + dot + name not in keys and section + dot + name.removeprefix("no_") not in keys
        if is_kept:
            kept.append(word)
    return kept
