"""The presets: config files that come with titan, found by name."""

import difflib
import tomllib
from pathlib import Path

from converters.errors import ConfigError

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def find_preset(name: str) -> Path | None:
    """The preset's file; None for an unknown name."""
    return _FOLDER / f"{name}.toml" if name in preset_names() else None


def preset_models() -> dict[str, tuple[str, str]]:
    """Family and flavor of each preset."""
    models = {name: tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))["model"] for name in preset_names()}
    return {name: (model["name"], model["flavor"]) for name, model in models.items()}


def write_preset(name: str, out: Path) -> None:
    """Copy a preset to a new file. Raises ConfigError for an unknown name, or if the file exists."""
    preset = find_preset(name)
    if preset is None:
        near = difflib.get_close_matches(name, preset_names(), n=2)
        raise ConfigError(
            f"there is no preset {name!r}",
            hint=f"presets: {', '.join(preset_names())}",
            tries=[f"titan config init {match}" for match in near],
        )
    try:
        file = out.open("x", encoding="utf-8")  # x: never overwrite
    except FileExistsError:
        raise ConfigError(f"{out} exists already", tries=[f"titan config init {name} ANOTHER.toml"]) from None
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from None
    try:
        with file:
            file.write(preset.read_text("utf-8"))
    except OSError as error:  # a full disk: remove the incomplete file
        out.unlink()
        raise ConfigError(f"{out}: {error.strerror}") from None


def describe_presets() -> list[tuple[str, str]]:
    """Each preset's name and the first comment line of its file."""
    return [
        (name, (_FOLDER / f"{name}.toml").read_text("utf-8").split("\n")[0].lstrip("# ")) for name in preset_names()
    ]
