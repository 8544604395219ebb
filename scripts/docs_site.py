"""mkdocs hooks: add the pages that are not files of docs/ (README, CONTRIBUTING, …, reference of commands and keys)."""

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, get_type_hints

import typer
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# The commands by what they are for. A test fails for a command that is missing here.
COMMAND_GROUPS = {
    "Checkpoints": ("download", "convert", "reshard", "inspect", "diff", "verify"),
    "Training": ("data", "config", "seed", "train", "estimate-memory"),
    "Generation": ("infer",),
    "Models": ("models",),
}
_LINK = re.compile(r"\[([^]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "cli.md", content=cli_reference()))
    files.append(File.generated(config, "config.md", content=config_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the repository at the pages of the site; those to other files become their text."""
    if not re.search("^## ", markdown, re.M):  # the column of contents would be empty: it is given to the text
        page.meta["hide"] = ["toc"]
    folder = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found[1], (folder / found[2]).resolve(), found[3] or ""
        if not path.exists():  # of another host, or wrong: mkdocs says so
            return found[0]
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({path.relative_to(ROOT / 'docs')}{anchor})"
        name = PAGES.get(str(path.relative_to(ROOT)))
        return f"[{text}]({name}{anchor})" if name else text

    return _LINK.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put drawings into the page, where they follow its colors; do not break options and short names at a hyphen."""
    html = re.sub(r'<img alt="([^"]*)" src="(?:\.\./)*(\w+\.svg)" ?/?>', _drawing, html)
    return re.sub(r"<code>([^<]+)</code>", lambda code: f"<code>{_in_whole_words(code[1])}</code>", html)


def _in_whole_words(code: str) -> str:
    """Short words of inline code, and longer ones with hyphens, as elements that site.css does not break."""

    def whole(word: re.Match[str]) -> str:
        return f"<span>{word[0]}</span>" if len(word[0]) <= (40 if "-" in word[0] else 24) else word[0]

    return re.sub(r"\S+", whole, code)


def _drawing(image: re.Match[str]) -> str:
    text = (ROOT / "docs" / image[2]).read_text()
    return text.replace("<svg ", f'<svg role="img" aria-label="{image[1]}" ', 1)


def cli_reference() -> str:
    """Every command with its arguments, options and examples, as Markdown."""
    from titan_tools.cli import app

    titan = typer.main.get_command(app)
    lines = ["# Command line\n", *_describe("titan", titan)]
    for title, names in COMMAND_GROUPS.items():
        lines.append(f"## {title}\n")
        for name in names:
            lines += _describe_all(f"titan {name}", titan.commands[name])
    return "\n".join(lines)


def _describe_all(path: str, command: Any) -> Iterator[str]:
    """A command, then the commands of its group."""
    yield f"### `{path}`\n"
    yield from _describe(path, command)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _describe_all(f"{path} {name}", inner)


def _describe(path: str, command: Any) -> Iterator[str]:
    for paragraph in (command.help or "").split("\n\n"):
        fixed, _, text = paragraph.partition("\b\n")  # typer's mark: keep these lines as they are
        title, _, lines = text.partition("\n")
        if title == "Examples:":
            yield f"```bash\n{dedent(lines).rstrip()}\n```\n"
        elif text:
            yield f"```text\n{text.rstrip()}\n```\n"
        else:
            yield f"{_escape(fixed)}\n"
    context = command.context_class(command, info_name=path)
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    tables: dict[str, list[Any]] = {}  # as the help groups them
    for parameter in shown:
        title = "Argument" if parameter.param_type_name == "argument" else parameter.rich_help_panel or "Option"
        tables.setdefault(title, []).append(parameter.get_help_record(context))
    for title, rows in sorted(tables.items(), key=lambda table: table[0] != "Argument"):
        yield f"| {title} | Description |\n|---|---|"
        for name, text in rows:
            yield f"| {_name(name)} | {_escape(_text(name, text))} |"
        yield ""


def _name(name: str) -> str:
    """`--to <dcp|hf>` without its values, which the description lists."""
    parts = [re.sub(r" <[^>]*>$", "", part) for part in re.split(r"(?:, | / )(?=-)", name)]
    return ", ".join(f"`{part}`" for part in parts)


def _text(name: str, text: str) -> str:
    """The help of a parameter, with its default and values as sentences."""
    help_text, _, facts = text.removesuffix("]").rpartition("  [") if text.endswith("]") else (text, "", "")
    sentences = [help_text]
    if values := re.search(r"<(?:list\[)?([^<>[]+\|[^]>]+)", name):
        sentences.append("One of " + ", ".join(f"`{value}`" for value in values[1].split("|")) + ".")
    for fact in filter(None, facts.split("; ")):
        key, _, value = fact.partition(": ")
        if bounds := re.fullmatch(r"(?:(\d+)<=)?x(?:>=(\d+)|<=(\d+))?", fact):
            least, most = bounds[1] or bounds[2], bounds[3]
            sentences.append(f"From {least} to {most}." if least and most else f"At least {least}.")
        else:
            sentences.append(f"{key.capitalize()}: {value}." if value else f"{key.capitalize()}.")
    return " ".join(sentences)


def config_reference() -> str:
    """Every key of a config with its values, default and meaning, as Markdown."""
    from trainer.config.load import by_section
    from trainer.config.sections import Config
    from trainer.config.show import toml_text
    from trainer.config.types import describe

    lines = [
        "# Config keys\n",
        "Every key that a run reads, in a section of a TOML file, or as `--section.key VALUE` on the command line. "
        "`titan config show CONFIG` prints the values of a config, and where each comes from.\n",
    ]
    for section, record in by_section(Config()).items():
        kinds, meanings = get_type_hints(type(record), include_extras=True), _meanings(type(record))
        lines.append(f"## `[{section}]`\n\n| Key | Default | Meaning |\n|---|---|---|")
        for key, kind in kinds.items():
            default, values = toml_text(getattr(record, key)), describe(kind)
            allowed = f" {values[0].upper()}{values[1:]}." if re.search("≥|>|one of|list", values) else ""
            lines.append(f"| `{key}` | `{default}` | {_escape(meanings[key] + allowed)} |")
        lines.append("")
    return "\n".join(lines)


def _meanings(section: type) -> dict[str, str]:
    """The docstring below each field."""
    (record,) = ast.parse(inspect.getsource(section)).body
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(record.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _escape(text: str) -> str:
    """One line of Markdown, in which names of options are code."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    parts = re.split(r"(`[^`]*`)", text)  # what is code already stays
    return "".join(
        part if part[:1] == "`" else re.sub(r"(?<![\w-])--[a-z][\w.-]*\w", r"`\g<0>`", part) for part in parts
    )


if __name__ == "__main__":
    print(cli_reference(), config_reference(), sep="\n")
