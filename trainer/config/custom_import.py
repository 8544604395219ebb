"""Import the module that `experimental.custom_import` or `titan --import` names, which registers extensions."""

import importlib
import sys
import traceback
from pathlib import Path

from converters.errors import ConfigError

_imported: set[Path] = set()  # files, and folders of packages


def import_custom(name: str, *, setting: str = "experimental.custom_import = {name!r}") -> str:
    """Import a dotted module name, or a path to a module file or package folder. Raises ConfigError where that fails.

    A path's parent folder is added to the import path, so that the module can import its neighbours. Returns a name
    that works in another process with any working directory. `setting` is its name in errors.
    """
    path, said = Path(name), setting.format(name=name)
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
        if isinstance(error, ModuleNotFoundError) and error.name == module and not hint:
            hint = "a path is relative to the working folder; a dotted name is of an installed module"
        raise ConfigError(f"{said} cannot be imported: {where}", hint=hint) from error
    origin = Path(imported.__file__ or next(iter(imported.__path__))).resolve()
    if is_path and path.resolve() not in (origin, *origin.parents):
        raise ConfigError(
            f"{said}: a module called {module!r} was already imported from {origin}",
            hint="rename your module",
        )
    _imported.add(origin.parent if origin.name == "__init__.py" else origin)
    return str(path.resolve()) if is_path else name


def where_to_look(error: BaseException) -> str:
    """The hint for an unexpected error: the last line of an imported module in its traceback, or titan itself."""
    if line := imported_line(error):
        return f"check {line}, which is not part of titan; the traceback is above"
    return "this is a bug in titan; the traceback is above"


def imported_line(error: BaseException) -> str:
    """The last line of an imported module in an error's traceback, empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if not _imported.isdisjoint((path, *path.parents)):
            return f"{frame.filename}:{frame.lineno}"
    return ""
