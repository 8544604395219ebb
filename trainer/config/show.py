"""Show a config: every value in TOML syntax with its origin, and the keys without effect."""

import json
from dataclasses import asdict
from typing import Any

from trainer.config.load import DEFAULT, by_section, origins
from trainer.config.refused import REFUSED
from trainer.config.sections import Config

COLUMNS = ("key", "value", "origin")


def rows(config: Config) -> list[tuple[str, str, str]]:
    """One row per key: name, value, origin."""
    return [(key, toml_text(setting.value), setting.origin) for key, setting in origins(config).items()]


def as_json(config: Config) -> dict[str, Any]:
    """The merged config by section, and the origin of each value that is not a default."""
    sections = {name: asdict(record) for name, record in by_section(config).items()}
    given = {key: setting.origin for key, setting in origins(config).items() if setting.origin != DEFAULT}
    return {"config": sections, "origins": given}


def unread(config: Config) -> list[str]:
    """Unsupported keys that are set to a value without effect, each with the reason."""
    return [f"{key} ({where}): {REFUSED[key].reason}" for key, where in config.origins.items() if key in REFUSED]


def toml_text(value: Any) -> str:
    """A value in TOML syntax; None, which TOML does not have, as `unset`."""
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else repr(value)
