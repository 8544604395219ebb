"""Files that come with titan, found by name: presets, which are configs, and launch scripts."""

import difflib
import tomllib
from pathlib import Path

from converters.common.errors import ConfigError

_FOLDER = Path(__file__).parent / "presets"
_SCRIPTS = Path(__file__).parent / "launch_scripts"


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def find_preset(name: str) -> Path | None:
    """The preset's file; None for an unknown name."""
    return _FOLDER / f"{name}.toml" if name in preset_names() else None


def preset_models() -> dict[str, tuple[str, str]]:
    """Family and flavor of each preset."""
    models = {name: tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))["model"] for name in preset_names()}
    return {name: (model["name"], model["flavor"]) for name, model in models.items()}


def write_template(name: str, out: Path | None) -> Path:
    """Copy a preset or a launch script to a new file; by default to its own name in the working directory.

    Raises ConfigError for an unknown name, or if the file exists.
    """
    scripts = [path.name for path in _SCRIPTS.iterdir()]
    source = _SCRIPTS / name if name in scripts else find_preset(name)
    if source is None:
        near = difflib.get_close_matches(name, [*preset_names(), *scripts], n=2)
        raise ConfigError(
            f"there is no preset {name!r}",
            hint=f"presets: {', '.join(preset_names())}; launch scripts: {', '.join(sorted(scripts))}",
            tries=[f"titan config init {match}" for match in near],
        )
    out = out or Path(source.name)
    try:
        file = out.open("x", encoding="utf-8")  # x: never overwrite
    except FileExistsError:
        raise ConfigError(f"{out} exists already", tries=[f"titan config init {name} ANOTHER{out.suffix}"]) from None
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from None
    try:
        with file:
            file.write(source.read_text("utf-8"))
        if name in scripts:
            out.chmod(0o755)
    except OSError as error:  # a full disk: remove the incomplete file
        out.unlink()
        raise ConfigError(f"{out}: {error.strerror}") from None
    return out


def describe_presets() -> list[tuple[str, str]]:
    """Each preset's name and the first comment line of its file."""
    return [(name, _first_comment(_FOLDER / f"{name}.toml")) for name in preset_names()]


def describe_scripts() -> list[tuple[str, str]]:
    """Each launch script's name and the first comment line of its file."""
    return [(path.name, _first_comment(path)) for path in sorted(_SCRIPTS.iterdir())]


def _first_comment(path: Path) -> str:
    return next(line for line in path.read_text("utf-8").splitlines() if not line.startswith("#!")).lstrip("# ")
