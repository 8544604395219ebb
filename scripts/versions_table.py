"""Write the results of test_versions.sh as the table of docs/versions.md, and the versions of cells that ran as JSON.

Usage: versions_table.py STATE CELL…
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "versions.md", ROOT / "titan_tools" / "tested_versions.json"
BEGIN, END = "<!-- results: written by scripts/versions_table.py -->\n", "<!-- end of results -->"
PACKAGES = ("python", "torch", "torchao", "transformers", "huggingface_hub", "torchtune")
HEADINGS = ("cell", *PACKAGES, "tests", "commands", "commit")


def main(state: Path, cells: list[str], page: Path = PAGE, record: Path = RECORD) -> None:
    rows, failures = [], []
    for name in cells:
        row, failed = _row(state / name)
        rows.append((name, *row))
        failures += [f"- {name}: {line}" for line in failed]
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS)), *map(_line, rows)]
    if failures:
        lines += ["", "Failures:", "", *failures]
    before, rest = page.read_text().split(BEGIN)
    page.write_text("\n".join([before + BEGIN, *lines, "", END]) + rest.split(END)[1])
    ran = [dict(zip(HEADINGS, row, strict=True)) for row in rows if row[1]]
    record.write_text(
        json.dumps({**json.loads(record.read_text()), "tested": ran}, indent=1, ensure_ascii=False) + "\n"
    )


def _row(cell: Path) -> tuple[list[str], list[str]]:
    """What the table says of a cell, and a line for each failure."""
    parts = [part for part in ("tests", "torchtune") if (cell / f"{part}.install").exists()]
    unfinished = not (cell / "seconds").exists()
    if unfinished and (cell / "tests.versions").exists() or not parts:
        said = "no interpreter" if (cell / "no_interpreter").exists() else "not run"
        return [*("" for _ in PACKAGES), said, "", ""], []
    versions, tests, failures = [], [], []
    for part in parts:
        after = "" if part == "tests" else " with torchtune"
        if not (cell / f"{part}.versions").exists():
            tests.append(_pip_error(cell / f"{part}.install") + after)
            continue
        versions.append(dict(line.split() for line in (cell / f"{part}.versions").read_text().splitlines()))
        said, failed = _tests(cell / f"{part}.xml")
        tests.append(said + after)
        failures += [f"{test}{after}" for test in failed]
    packages = [" / ".join(dict.fromkeys(v[name] for v in versions if name in v)) for name in PACKAGES]
    commands = _lines(cell / "commands")
    failed = [line.split(" ", 1)[1] for line in commands if line.startswith("failed ")]
    failures += [f"`titan {command}`" for command in failed]
    commit = f"{_lines(cell / 'commit')[0]}, {_lines(cell / 'date')[0]}"
    return [*packages, "; ".join(tests), _counts(len(commands) - len(failed), len(failed)), commit], failures


def _tests(xml: Path) -> tuple[str, list[str]]:
    """Counts and failing tests of a run of pytest."""
    if not xml.exists():
        return "did not finish", []
    cases = list(ElementTree.parse(xml).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    said = _counts(len(cases) - len(failed) - skipped, len(failed)) + (f", {skipped} skipped" if skipped else "")
    return said, [f"`{case.get('file')}::{case.get('name')}`" for case in failed]


def _pip_error(output: Path) -> str:
    errors = [line.removeprefix("ERROR: ") for line in _lines(output) if line.startswith("ERROR: ")]
    kind = (
        "cannot be installed together"
        if any("conflicting dependencies" in line for line in errors)
        else "not installed"
    )
    return f"{kind} (`{errors[0] if errors else 'pip says nothing'}`)"


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _counts(passed: int, failed: int) -> str:
    return f"{passed:,} passed" + (f", {failed} failed" if failed else "")


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
