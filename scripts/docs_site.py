"""mkdocs hooks: add the pages that are not files of docs/ (README, CONTRIBUTING, CHANGELOG, the CLI reference)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_REPOSITORY_FILES = r"\[([^]]+)\]\((?:\.\./)?(?:LICENSE|scripts/[\w./-]+)\)"


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "cli.md", content=cli_reference()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links between the repository root and docs/ at the pages of the site; show the titles of code blocks."""
    markdown = re.sub(r'^```(\w+) title="([^"]+)"$', r"`\2`:\n\n```\1", markdown, flags=re.M)
    markdown = re.sub(_REPOSITORY_FILES, r"\1", markdown).replace("](docs/", "](")
    for source, page in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}").replace(f"]({source}", f"]({page}")
    return markdown


def cli_reference() -> str:
    """Every command with its arguments, options and examples, as Markdown."""
    from titan_tools.cli import app

    return "\n".join(["# CLI reference\n", *_describe("titan", typer.main.get_command(app))])


def _describe(path: str, command: Any) -> Iterator[str]:
    yield f"## `{path}`\n"
    for paragraph in (command.help or "").split("\n\n"):
        fixed, _, text = paragraph.partition("\b\n")  # typer's mark: keep these lines as they are
        yield f"```text\n{text}\n```\n" if text else f"{_escape(fixed)}\n"
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    for title, kind in (("Argument", "argument"), ("Option", "option")):
        rows = [p for p in shown if p.param_type_name == kind]
        if rows:
            yield f"| {title} | Description |\n|---|---|"
            for parameter in rows:
                yield f"| {_name(parameter)} | {_escape(_text(parameter))} |"
            yield ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _describe(f"{path} {name}", inner)


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if parameter.is_flag or not parameter.metavar else f" {parameter.metavar}"
    return ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _text(parameter: Any) -> str:
    default = parameter.default
    is_shown = not parameter.required and default not in (None, "", False) and "Default:" not in (parameter.help or "")
    return f"{parameter.help or ''}{f' Default: {default}.' if is_shown else ''}"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(cli_reference())
