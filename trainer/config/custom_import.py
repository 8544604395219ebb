"""Import the module that `experimental.custom_import` or `titan --import` names, which registers extensions."""

import importlib
import sys
from pathlib import Path

from converters.errors import ConfigError


def import_custom(name: str, *, told: str = "experimental.custom_import = {name!r}") -> str:
    """Import a dotted module name, or a path to a module file or package folder. Raises ConfigError where that fails.

    A path's parent folder is added to the import path, so that the module can import its neighbours. Returns a name
    that works in another process with any working directory. `told` is the setting's name in errors.
    """
    path, said = Path(name), told.format(name=name)
    is_path = path.suffix == ".py" or "/" in name or path.is_dir()
    if is_path:
        if not path.exists():
            raise ConfigError(f"{said}: there is no such file or folder")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)
    module = path.resolve().stem if is_path else name
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        where = f"{type(error).__name__}: {error}"
        path_here = f"{name.replace('.', '/')}.py"  # the working directory is not on the import path
        hint = (
            f"to import a file of this folder, give its path: {path_here}"
            if not is_path and Path(path_here).is_file()
            else ""
        )
        raise ConfigError(f"{said} cannot be imported: {where}", hint=hint) from error
    origin = Path(imported.__file__ or next(iter(imported.__path__))).resolve()
    if is_path and path.resolve() not in (origin, *origin.parents):
        raise ConfigError(
            f"{said}: a module called {module!r} was already imported from {origin}",
            hint="rename your module",
        )
    return str(path.resolve()) if is_path else name
