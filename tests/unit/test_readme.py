"""The README tells the truth: its list of files is the docstrings', its commands exist. Run this to renew the list."""

import ast
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PACKAGES = ("titan_tools", "trainer", "converters")
BEGIN, END = "<!-- files: made by tests/unit/test_readme.py -->\n", "<!-- end of files -->\n"


def first_line(file: Path) -> str:
    """The first sentence of the module's docstring, in one line."""
    paragraph = ast.get_docstring(ast.parse(file.read_text())).split("\n\n")[0]
    return " ".join(paragraph.split())


def list_files() -> str:
    """A block per folder, a line per file, in the order of the tree."""
    blocks = []
    for package in PACKAGES:
        for folder in sorted({file.parent for file in (ROOT / package).rglob("*.py")}):
            files = [file for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
            if files:
                width = max(len(file.name) for file in files)
                lines = [f"  {file.name:<{width}}  {first_line(file)}" for file in files]
                blocks.append("\n".join([f"{folder.relative_to(ROOT)}/", *lines]))
    return "```text\n" + "\n".join(blocks) + "\n```\n"


def test_the_list_of_files_is_current():
    text = README.read_text()
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert written == list_files(), "renew it: python tests/unit/test_readme.py"


def test_every_titan_command_in_the_readme_exists():
    from titan_tools.cli import app

    known = {info.name for info in app.registered_commands} | {group.name for group in app.registered_groups}
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", README.read_text(), re.S)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("titan ")]
    assert len(commands) >= 12
    assert {words[1] for words in commands} <= known
    assert known <= {words[1] for words in commands}, "the README shows every command"


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(text[: text.index(BEGIN) + len(BEGIN)] + list_files() + text[text.index(END) :])
    sys.exit(0)
