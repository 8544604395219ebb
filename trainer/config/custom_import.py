"""Import what `experimental.custom_import` or `titan --import` names: it may register a family, a dataset, a loss."""

import importlib
import sys
from pathlib import Path

from converters.errors import ConfigError


def import_custom(name: str, *, told: str = "experimental.custom_import = {name!r}") -> str:
    """Import a dotted module name, or a path to a module file or package folder. Raises ConfigError where that fails.

    A path's parent folder joins the import path for good, so that the module can import its neighbours. Returns the
    name by which another process finds it, whatever its working folder. `told`: how errors call it.
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
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and all of it is theirs to read
        where = f"{type(error).__name__}: {error}"
        beside = f"{name.replace('.', '/')}.py"  # the working folder is not on the import path
        hint = f"a file of this folder is named by its path: {beside}" if not is_path and Path(beside).is_file() else ""
        raise ConfigError(f"{said} cannot be imported: {where}", hint=hint) from error
    origin = Path(imported.__file__ or next(iter(imported.__path__))).resolve()
    if is_path and path.resolve() not in (origin, *origin.parents):
        raise ConfigError(
            f"{said}: a module called {module!r} is already known from {origin}",
            hint="give yours another name",
        )
    return str(path.resolve()) if is_path else name
