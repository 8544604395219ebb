"""The list of deliberate breaks: what an entry is, and where its text and its tests are.

An entry of a TOML file of this folder:

    [[break]]
    name = "divisor-off-by-one"
    old = 'total / num_tokens'    # one short expression that occurs once in all packages; no comment, no message
    new = 'total / (num_tokens + 1)'
    in = "trainer"                # only where it occurs elsewhere too: the folder that is searched
    tests = ["loss_divisor"]      # names of test functions or parts of them, wherever they are; `[ID]` may follow
    unseen_because = "…"          # only where no test of the normal suite sees it

No file of the code or of the tests is named, so that moving code and tests needs no change.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGES = ("converters", "trainer", "titan_tools")


@dataclass(frozen=True)
class Break:
    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    folders: tuple[str, ...] = PACKAGES
    unseen_because: str = ""


def load_breaks() -> list[Break]:
    """All entries, in the order of the files' names."""
    return [
        Break(
            each["name"],
            each["old"],
            each["new"],
            tuple(each["tests"]),
            (each["in"],) if "in" in each else PACKAGES,
            each.get("unseen_because", ""),
        )
        for file in sorted(FOLDER.glob("*.toml"))
        for each in tomllib.loads(file.read_text())["break"]
    ]


def locate(each: Break, tree: Path) -> Path:
    """The one file that has the text. LookupError where it does not occur exactly once."""
    files = [file for folder in each.folders for file in sorted((tree / folder).rglob("*.py"))]
    found = [file for file in files for _ in range(_text(file).count(each.old))]
    if len(found) != 1:
        where = "".join(f"\n  in {file.relative_to(tree)}" for file in found)
        raise LookupError(
            f"break {each.name}: its text must occur once in {', '.join(each.folders)}; it occurs {len(found)} times"
            f"{where}\n  {each.old}\nhint: the code was changed; change the entry in {FOLDER.name}/*.toml with it"
        )
    return found[0]


def find_tests(each: Break, tree: Path) -> list[str]:
    """Its tests as pytest's node IDs. LookupError where one does not exist."""
    return [node for name in each.tests for node in _nodes(each.name, name, tree)]


def _nodes(owner: str, wanted: str, tree: Path) -> list[str]:
    part, bracket, case = wanted.partition("[")
    for pattern in (rf"^def (test_{part})\(", rf"^def (test_\w*{part}\w*)\("):  # a whole name before a part of several
        nodes = [
            f"{file.relative_to(tree)}::{name}{bracket}{case}"
            for file in _test_files(tree)
            for name in re.findall(pattern, _text(file), re.MULTILINE)
        ]
        if nodes:
            return nodes
    raise LookupError(
        f"break {owner}: no test has {part!r} in its name\n"
        f"hint: the test was renamed; change the entry in {FOLDER.name}/*.toml with it"
    )


@cache
def _test_files(tree: Path) -> list[Path]:
    return sorted(file for file in (tree / "tests").rglob("test_*.py") if file.parent.name not in ("gpu", FOLDER.name))


@cache
def _text(file: Path) -> str:
    return file.read_text()
