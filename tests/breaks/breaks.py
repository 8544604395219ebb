"""The list of deliberate breaks: what an entry is, the change that it makes, and which tests must see it.

An entry of a TOML file of this folder:

    [[break]]
    name = "divisor-off-by-one"
    in = "trainer.step:Step.scale"    # module:qualified name of a function, a method or a class; or the module alone
    old = 'total / num_tokens'        # occurs once in its source; no comment, no message
    new = 'total / (num_tokens + 1)'
    tests = ["loss_divisor"]          # names of test functions or parts of them, wherever they are; `[ID]` may follow
    unseen_because = "…"              # only if no test of the normal suite sees it

No file of the tests is named, so that moving tests needs no change.
"""

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGES = ("converters", "trainer", "titan_tools")
_HINT = f"\nhint: the code was changed; change the entry in {FOLDER.name}/*.toml with it"


@dataclass(frozen=True)
class Break:
    name: str
    module: str
    function: str  # qualified name; "" for a whole module
    old: str
    new: str
    tests: tuple[str, ...]
    unseen_because: str = ""


def load_breaks() -> list[Break]:
    """All entries, in the order of the files' names."""
    return [
        Break(
            each["name"],
            *each["in"].partition(":")[::2],
            each["old"],
            each["new"],
            tuple(each["tests"]),
            each.get("unseen_because", ""),
        )
        for file in sorted(FOLDER.glob("*.toml"))
        for each in tomllib.loads(file.read_text())["break"]
    ]


def broken(each: Break, tree: Path) -> tuple[Path, str, str]:
    """The file, its text with the change, and the changed source of the function.

    LookupError if there is no such function, or its source does not have the text exactly once.
    """
    file = tree.joinpath(*each.module.split(".")).with_suffix(".py")
    file = file if file.exists() else file.with_suffix("") / "__init__.py"
    start, end = _places(file).get(each.function, (0, 0))
    lines = _lines(file)
    source = "".join(lines[start:end])
    if (count := source.count(each.old)) != 1:
        missing = "" if end else ": there is no such function"
        raise LookupError(
            f"break {each.name}: its text must occur once in {each.module}:{each.function}{missing}; it occurs "
            f"{count} times\n  {each.old}{_HINT}"
        )
    source = source.replace(each.old, each.new)
    return file, "".join([*lines[:start], source, *lines[end:]]), source


@cache
def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines(keepends=True) if file.exists() else []


@cache
def _places(file: Path) -> dict[str, tuple[int, int]]:
    """Qualified name → its lines [start, end); functions inside functions belong to the outer one."""
    lines = _lines(file)
    places = {"": (0, len(lines))}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                places[prefix + node.name] = first - 1, node.end_lineno or 0
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse("".join(lines)).body, "")
    return places


def find_tests(each: Break, tree: Path) -> list[str]:
    """Its tests as pytest's node IDs. LookupError if one does not exist."""
    return [node for name in each.tests for node in _nodes(each.name, name, tree)]


def _nodes(owner: str, wanted: str, tree: Path) -> list[str]:
    part, bracket, case = wanted.partition("[")
    tests = _tests(tree)
    names = [name for name in tests if name == f"test_{part}"] or [name for name in tests if part in name[5:]]
    if not names:
        raise LookupError(f"break {owner}: no test has {part!r} in its name{_HINT.replace('code', 'test')}")
    return [f"{file}::{name}{bracket}{case}" for name in names for file in tests[name]]


@cache
def _tests(tree: Path) -> dict[str, list[str]]:
    """Name of a test function → the files that have it, as paths below `tree`."""
    tests: dict[str, list[str]] = {}
    for file in sorted((tree / "tests").rglob("test_*.py")):
        if file.parent.name not in ("gpu", FOLDER.name):
            for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE):
                tests.setdefault(name, []).append(str(file.relative_to(tree)))
    return tests
