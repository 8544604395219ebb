"""Words that the shell completes: models in the hub's cache, presets, config keys and their values, dtypes, GPU types.

Imports neither torch nor the hub's client. An empty answer lets the shell complete files.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any, get_args

from typer.core import TyperCommand

_Answers = list[str]


def complete_checkpoint(incomplete: str) -> _Answers:
    """Names of models in the hub's cache, if no local path begins like that."""
    from converters.store.hub_names import cached_names

    return [] if not incomplete or _files(incomplete) else _beginning(cached_names(), incomplete)


def complete_config(incomplete: str) -> _Answers:
    """Presets, and the TOML files beside them that begin like that."""
    from trainer.config.preset import preset_names

    found = _beginning(preset_names(), incomplete)
    return [*found, *(name for name in _files(incomplete) if name.endswith(".toml"))] if found else []


def complete_dtype(incomplete: str) -> _Answers:
    """Element types that weights are cast to."""
    from converters.common.dtypes import DTYPES

    return _beginning((name for name, dtype in DTYPES.items() if dtype.is_floating), incomplete)


def complete_gpu(incomplete: str) -> _Answers:
    """GPU types of a memory estimate."""
    from trainer.ranks.gpus import GPUS

    return _beginning(GPUS, incomplete)


def complete_allocator(incomplete: str) -> _Answers:
    """Modes of CUDA's allocator."""
    from titan_tools.memory.replay.allocator import AllocatorName

    return _beginning(get_args(AllocatorName), incomplete)


class _ConfigCommand(TyperCommand):
    """A command that takes every key of the config as `--section.key VALUE`, which is completed like its options."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The command's options and the config's keys, or values of the key before."""
        from typer._click.shell_completion import CompletionItem

        values = [str(value) for value in ctx.params.values()]
        words = [word for word in ctx.args if word != "="]  # bash makes a word of it
        words = words or [value for value in values if value.startswith("--")]  # it has the place of an argument
        found = _complete_override(values, words, incomplete)
        return [*super().shell_complete(ctx, incomplete), *map(CompletionItem, found)]


TAKES_CONFIG: dict[str, Any] = {  # how such a command is registered
    "cls": _ConfigCommand,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


def _complete_override(values: list[str], words: list[str], incomplete: str) -> _Answers:
    """`values`: of the command's own parameters, with the config; `words`: the overrides."""
    from trainer.config.sections import kinds
    from trainer.config.types import choices

    if incomplete.startswith("-"):
        return _beginning((f"--{key}" for key in kinds()), incomplete)
    key = words[-1].removeprefix("--") if words else ""
    if key in ("checkpoint.initial_load_path", "model.hf_assets_path"):
        return complete_checkpoint(incomplete)
    if key in ("model.name", "model.flavor"):
        return _beginning(_families_or_flavors(key, values, words), incomplete)
    return _beginning(choices(kinds()[key]), incomplete) if key in kinds() else []


def _families_or_flavors(key: str, values: list[str], words: list[str]) -> Iterable[str]:
    """The families; or the flavors of the family that --model.name or a preset names, else those of all."""
    from converters.families.registry import all_families
    from trainer.config.preset import preset_models, preset_names

    families = all_families()
    if key == "model.name":
        return families
    named = [name for flag, name in pairwise(words) if flag == "--model.name"]
    named = named or [preset_models()[value][0] for value in values if value in preset_names()]
    chosen = [families[name] for name in named if name in families] or families.values()
    return (flavor for family in chosen for flavor in family.flavors)


def _files(incomplete: str) -> _Answers:
    """Paths that begin like that, as the shell would complete them."""
    folder, name = os.path.split(os.path.expanduser(incomplete))
    with suppress(OSError):
        return sorted(os.path.join(folder, each) for each in os.listdir(folder or ".") if each.startswith(name))
    return []


def _beginning(values: Iterable[str], incomplete: str) -> _Answers:
    return [value for value in dict.fromkeys(values) if value.startswith(incomplete)]
