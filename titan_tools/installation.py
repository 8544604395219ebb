"""Problems of the installation: packages of somebody else in titan's place, versions that do not fit.

`trainer` and `converters` are generic names, which other distributions install, too. If they overwrote, removed or
hide titan's, one message names them and the command that mends it. Nothing of titan's is imported here.
"""

import csv
import hashlib
import json
import os
import platform
import re
import shlex
import sys
import traceback
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "titan-tools"
_HOME = Path(__file__).resolve().parent.parent
TESTED = json.loads(Path(__file__).with_name("tested_versions.json").read_text("utf-8"))
NEWEST_TESTED_TORCH = max(tuple(map(int, cell["torch"].split(".")[:2])) for cell in TESTED["tested"])
_PACKAGES = ("trainer", "converters")


class Problem(NamedTuple):
    """A fault of the installation: what is wrong, why, and commands that mend it."""

    message: str
    hint: str = ""
    tries: tuple[str, ...] = ()
    exit_code: int = 2


def find_foreign_package() -> Problem:
    """Why `import trainer` or `import converters` would not run titan's own, as __main__.py has found."""
    for name in _PACKAGES:
        own, spec = _HOME / name / "__init__.py", find_spec(name)
        if not own.is_file():
            return _incomplete([own])
        if _origin(spec) != own:
            return _shadowed(name, spec)
        if own.stat().st_size:  # titan's is empty
            return _overwritten(own, _owner(own))
    return Problem(f"titan's packages in {_HOME} cannot be imported")


def explain(error: BaseException) -> Problem | None:
    """The fault of the installation that an unexpected error comes from, if there is one. Takes up to a second."""
    try:
        titan = distribution(DISTRIBUTION)
    except PackageNotFoundError:  # run from its source
        return _untested_torch(error)
    recorded = {
        Path(str(titan.locate_file(path))): code
        for path, code, *_ in csv.reader((titan.read_text("RECORD") or "").splitlines())  # .files leaves out lost ones
        if path.endswith(".py") and path.split("/")[0] in (*_PACKAGES, "titan_tools")
    }
    if missing := [file for file in recorded if not file.exists()]:
        return _incomplete(missing)
    changed = [file for file, code in recorded.items() if code and _hash(file, code.partition("=")[0]) != code]
    for file in changed:  # maybe by the user
        if owner := _owner(file):
            return _overwritten(file, owner)
    for file in recorded:
        package = file.with_suffix("") / "__init__.py"
        if package.exists() and package not in recorded:
            return _overwritten(package, _owner(package), did=f"installed it, which hides {file}")
    return _unmet(titan, with_missing=isinstance(error, ImportError)) or _untested_torch(error)


def note_on_torch() -> str:
    """One line for a torch that is newer than all that titan was tested with, else empty. Does not import torch."""
    found, newest = _torch_version(), NEWEST_TESTED_TORCH
    return f"torch {_dotted(found)} was not tested with titan; {_dotted(newest)} was" if found > newest else ""


def versions() -> dict[str, Any]:
    """Versions of titan and of what it works with, as installed here, and those that were tested together.

    Without an installed titan, or for a package that is absent, the version is None.
    """
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "torchao", "transformers", "huggingface_hub", "torchtune"):
        installed[name] = _version(name)
    return {"titan": _version(DISTRIBUTION), "installed": installed, **TESTED}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _origin(spec: ModuleSpec | None) -> Path | None:
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _shadowed(name: str, spec: ModuleSpec | None) -> Problem:
    """Another package of this name comes before titan's on the import path."""
    origin = _origin(spec)
    if origin is None:
        return Problem(f"the package {name!r} cannot be imported, though it lies in {_HOME}", "see Python's sys.path")
    message = f"the package {name!r} on the import path is not titan's: {origin}"
    if (owner := _owner(origin)) is not None:
        return Problem(
            f"{message}, of the distribution {_named(owner)}",
            "it comes before titan's, and both install a package of this name",
            (f"{_pip()} uninstall -y {owner.name}",),
        )
    folder = origin.parent.parent if origin.name == "__init__.py" else origin.parent
    command = " ".join(map(shlex.quote, sys.argv[1:]))
    if str(folder) in [
        str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each
    ]:
        return Problem(message, f"PYTHONPATH names {folder}", (f"env -u PYTHONPATH titan {command}".rstrip(),))
    if folder == Path.cwd() and not sys.flags.safe_path:
        return Problem(
            message,
            "a folder of that name in the working directory shadows it",
            (f"{_python()} -P -m titan_tools {command}".rstrip(),),
        )
    return Problem(message, f"{folder} is before {_HOME} in Python's sys.path")


def _overwritten(file: Path, owner: Distribution | None, *, did: str = "overwrote it") -> Problem:
    """Another distribution was installed over titan's files, or between them."""
    by = f"the distribution {_named(owner)}" if owner else "something else that installs a package of this name"
    remove = (f"{_pip()} uninstall -y {owner.name}",) if owner else ()
    return Problem(
        f"{file} is not titan's: {by} {did}",
        f"titan installs packages called {' and '.join(_PACKAGES)}; keep the other one in an environment of its own",
        (" && ".join((*remove, *_reinstall())),),
    )


def _incomplete(missing: Sequence[Path]) -> Problem:
    more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
    return Problem(
        f"titan is not whole: {missing[0]}{more} does not exist",
        f"removing another distribution that installs {' or '.join(_PACKAGES)} removes files of titan, too",
        _reinstall(),
    )


def _unmet(titan: Distribution, *, with_missing: bool) -> Problem | None:
    """Requirements in a version that does not fit.

    With `with_missing`, for a failed import, also what is not installed, and the requirements of requirements: an
    environment without torch is no fault by itself.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return Problem("titan needs packaging, and it is not installed", tries=(f"{_pip()} install packaging",))
    unmet: dict[tuple[str, str], list[str]] = {}  # requirements by who has them, and what is wrong
    visited, queue = {titan.name}, [titan]
    while queue:
        user = queue.pop(0)
        for need in map(Requirement, user.requires or ()):
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            required = f"{need.name}{need.specifier}"
            try:
                installed = distribution(need.name)
            except PackageNotFoundError:
                if with_missing:
                    unmet.setdefault((user.name, "not installed"), []).append(required)
                continue
            if not need.specifier.contains(installed.version, prereleases=True):
                unmet.setdefault((user.name, f"{installed.version} is installed"), []).append(required)
            if with_missing and installed.name not in visited:
                visited.add(installed.name)
                queue.append(installed)
    if not unmet:
        return None
    return Problem(
        "; ".join(f"{user} needs {', '.join(needs)}: {why}" for (user, why), needs in unmet.items()),
        tries=(f"{_pip()} install {' '.join(shlex.quote(need) for needs in unmet.values() for need in needs)}",),
    )


def _untested_torch(error: BaseException) -> Problem | None:
    note = note_on_torch()
    if not note:
        return None
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
    newer = f"torch<{NEWEST_TESTED_TORCH[0]}.{NEWEST_TESTED_TORCH[1] + 1}"
    tries = (f"{_pip()} install {shlex.quote(newer)}",)
    return Problem(f"{type(error).__name__}: {error}{where}", note, tries, exit_code=3)


def _torch_version() -> tuple[int, ...]:
    found = _version("torch") or ""
    return tuple(int(number) for number in re.findall(r"\d+", found.partition("+")[0])[:2])


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _owner(path: Path) -> Distribution | None:
    """The other distribution that installed a file, or whose editable source it is part of."""
    for each in distributions():
        if each.name and re.sub(r"[-_.]+", "-", each.name).lower() != DISTRIBUTION:
            if _is_editable(source := _source(each)) and Path(_local(source["url"])).resolve() in path.parents:
                return each
            listed = (
                file for file in each.files or () if file.parts[0] in (*_PACKAGES, *(f"{n}.py" for n in _PACKAGES))
            )
            if any(Path(str(each.locate_file(file))).resolve() == path for file in listed):
                return each
    return None


def _source(each: Distribution) -> dict[str, Any]:
    """The origin from which pip installed a distribution, if not an index."""
    source: dict[str, Any] = json.loads(each.read_text("direct_url.json") or "{}")
    return source


def _is_editable(source: dict[str, Any]) -> bool:
    return bool(source.get("dir_info", {}).get("editable"))


def _hash(file: Path, kind: str) -> str:
    """The hash of a file as pip records it."""
    code = urlsafe_b64encode(hashlib.new(kind, file.read_bytes()).digest()).rstrip(b"=").decode()
    return f"{kind}={code}"


def _local(url: str) -> str:
    return unquote(urlsplit(url).path)


def _named(owner: Distribution) -> str:
    return f"{owner.name} {owner.version}"


def _reinstall() -> tuple[str, ...]:
    """The command that installs this version of titan again, from where it came; none for an editable one."""
    try:
        titan = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return ()
    source = _source(titan)
    if _is_editable(source):
        return ()
    if vcs := source.get("vcs_info"):
        what = f"{vcs['vcs']}+{source['url']}@{vcs['commit_id']}"
    elif source.get("url", "").startswith("file:"):
        what = _local(source["url"])
    else:
        what = source.get("url", "") or f"{DISTRIBUTION}=={titan.version}"
    return (f"{_pip()} install --force-reinstall --no-deps {shlex.quote(what)}",)


def _python() -> str:
    return shlex.quote(sys.executable)


def _pip() -> str:
    return f"{_python()} -m pip"
