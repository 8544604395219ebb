"""The entry of the command line: check that what it imports is titan's, then import and run it.

`python -P -m titan_tools …` starts the ranks; `-P` keeps a `trainer` folder of the working directory out. The check
imports nothing of titan's but this package: another distribution may have taken the place of the others.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from titan_tools.terminal.console import print_error

if TYPE_CHECKING:
    from titan_tools.installation import Problem


def main() -> None:
    """Run the command line and leave with its exit code."""
    if not _are_titans("trainer", "converters"):
        from titan_tools.installation import find_foreign_package

        _leave(find_foreign_package())
    try:
        from titan_tools import cli
    except Exception as error:
        from titan_tools.installation import explain

        if problem := explain(error):
            _leave(problem)
        raise
    cli.main()


def _leave(problem: "Problem") -> NoReturn:
    sys.exit(print_error("installation", *problem))


def _are_titans(*packages: str) -> bool:
    """Whether titan's own packages would be imported. Their __init__.py files are empty."""
    home = Path(__file__).resolve().parent.parent
    for name in packages:
        own, spec = home / name / "__init__.py", find_spec(name)
        if spec is None or not spec.origin or Path(spec.origin).resolve() != own or own.stat().st_size:
            return False
    return True


if __name__ == "__main__":
    main()
