"""The configs that come with titan: TOML files beside this one, found by their name."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def find_preset(name: str) -> Path | None:
    """The preset's file, or None where no preset is called so."""
    return _FOLDER / f"{name}.toml" if name in preset_names() else None
