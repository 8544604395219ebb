"""Import the module that `experimental.custom_import` or `titan --import` names, which registers extensions."""

import importlib
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from converters.common.errors import ConfigError, TitanError
from converters.common.extensions import ExtensionError, where_defined

# Where imported modules and their neighbours are: a folder, or a file. What titan and Python have within is not theirs
_imported: set[Path] = set()
imported_modules: list[str] = []  # their names, by which a process with the same import path imports them
_TITAN = Path(__file__).resolve().parents[2]
_NOT_THEIRS = [_TITAN / name for name in ("converters", "trainer", "titan_tools")] + [
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
]


def import_custom(name: str, *, setting: str = "experimental.custom_import = {name!r}") -> str:
    """Import a dotted module name, or a path to a module file or package folder. Raises ConfigError if it is not
    found, and ExtensionError if it has an error.

    A path's parent folder is added to the import path, so that the module can import its neighbours. Returns a name
    that works in another process with any working directory. `setting` is its name in errors.
    """
    path, label = Path(name), setting.format(name=name)
    is_path = path.suffix == ".py" or "/" in name or path.is_dir()
    if is_path:
        if not path.exists():
            raise ConfigError(f"{label}: there is no such file or folder")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)
    module = path.resolve().stem if is_path else name
    _imported.add(path.resolve().parent if is_path else _place_of(name.partition(".")[0]))
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        what = error.message if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"
        path_here = f"{name.replace('.', '/')}.py"  # the working directory is not on the import path
        hint = (
            f"to import a file of this folder, give its path: {path_here}"
            if not is_path and Path(path_here).is_file()
            else ""
        )
        if isinstance(error, ModuleNotFoundError) and error.name == module and not hint:
            hint = "a path is relative to the working folder; a dotted name is of an installed module"
        if isinstance(error, TitanError):
            hint = error.hint
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_imported(frame.filename)]
        where = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
        if isinstance(error, SyntaxError):
            what, where = f"{type(error).__name__}: {error.msg}", f" ({error.filename}:{error.lineno})"
        # without a line of theirs, the module was not found
        kind = ExtensionError if where else ConfigError
        raise kind(f"{label} cannot be imported: {what}{where}", hint=hint) from error
    imported_modules.append(module)
    origin = Path(imported.__file__ or next(iter(imported.__path__))).resolve()
    if is_path and path.resolve() not in (origin, *origin.parents):
        raise ConfigError(
            f"{label}: a module called {module!r} was already imported from {origin}",
            hint="rename your module",
        )
    return str(path.resolve()) if is_path else name


def where_to_look() -> str:
    """The hint for an unexpected error that names no imported module."""
    if _imported:
        modules = ", ".join(map(str, sorted(_imported)))
        return f"this is a bug in titan, or in what {modules} registers; the traceback is above"
    return "this is a bug in titan; the traceback is above"


def error_of_import(error: BaseException) -> tuple[ExtensionError, str] | None:
    """An unexpected error of an imported module: the error to show, and its traceback, of that module's lines alone.

    None if no line of the traceback, nor of a compiler's message, is in an imported module, nor is the function or
    class that was called or read wrongly.
    """
    for link in _chain(error):
        frames = traceback.extract_tb(link.__traceback__)
        user_frames = [frame for frame in frames if _is_imported(frame.filename)]
        if user_frames:
            raised_elsewhere = [] if frames[-1] is user_frames[-1] else frames[-1:]
            lines = traceback.format_list([*user_frames, *raised_elsewhere]) + traceback.format_exception_only(link)
            where = f"{user_frames[-1].filename}:{user_frames[-1].lineno}"
            return _shown(link, where), "Traceback in your module:\n" + "".join(lines)
    named_lines = [f"{file}:{line}" for file, line in _NAMED_LINE.findall(str(error)) if _is_imported(file)]
    if named_lines:  # what torch.compile says of code that it traced
        return _shown(error, named_lines[-1]), "".join(traceback.format_exception_only(error))
    if where := _definition(error):
        return _shown(error, where), "".join(traceback.format_exception(error))
    return None


def _definition(error: BaseException) -> str:
    """`file:line` of a function or class of an imported module that a caller's error is about; empty for others."""
    found: list[Any] = []
    if isinstance(error, AttributeError):
        found = [type(error.obj)]
    elif isinstance(error, TypeError) and (called := _CALLED.match(str(error))):
        for module in list(sys.modules.values()):
            file = vars(module).get("__file__")  # torch.classes answers any attribute
            if file and _is_imported(file):
                with suppress(AttributeError):
                    found.append(attrgetter(called[1])(module))
    lines = (where_defined(thing) for thing in found)
    return next((line for line in lines if _is_imported(line.rpartition(":")[0])), "")


_CALLED = re.compile(r"([\w.]+)\(\) (?:takes|missing|got) ")  # Python's words for arguments that do not fit
_NAMED_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')


def _shown(error: BaseException, line: str) -> ExtensionError:
    text = str(error).strip().partition("\n")[0]
    return ExtensionError(
        f"{line}: {type(error).__name__}{f': {text}' if text else ''}",
        hint="this file is yours, imported by --import or experimental.custom_import; its traceback is above",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _place_of(name: str) -> Path:
    """The folder of an installed package, or the file of a module."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin if spec is not None and spec.origin else name).resolve()


def _is_imported(file: str) -> bool:
    path = Path(file).resolve()
    places = _imported.intersection((path, *path.parents))
    return any(not any(other in path.parents and place in other.parents for other in _NOT_THEIRS) for place in places)
