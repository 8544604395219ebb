"""Import the module that `experimental.custom_import` names: it may register the user's own family or dataset."""

import importlib
import sys
from pathlib import Path

from converters.errors import ConfigError


def import_custom(name: str) -> None:
    """Import a dotted module name, or a path to a module file or package folder. Raises ConfigError where that fails.

    A path's parent folder joins the import path for good, so that the module can import its neighbours.
    """
    path = Path(name)
    is_path = path.suffix == ".py" or "/" in name or path.is_dir()
    if is_path:
        if not path.exists():
            raise ConfigError(f"experimental.custom_import = {name!r}: there is no such file or folder")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)
    module = path.resolve().stem if is_path else name
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # the user's code may raise anything, and all of it is theirs to read
        where = f"{type(error).__name__}: {error}"
        raise ConfigError(f"experimental.custom_import = {name!r} cannot be imported: {where}") from error
    origin = Path(imported.__file__ or next(iter(imported.__path__))).resolve()
    if is_path and path.resolve() not in (origin, *origin.parents):
        raise ConfigError(
            f"experimental.custom_import = {name!r}: a module called {module!r} is already known from {origin}",
            hint="give yours another name",
        )
