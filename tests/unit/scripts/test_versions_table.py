"""The table of tested versions says what passed, what failed and what pip refused."""

import json

import pytest

from scripts.versions_table import BEGIN, END, main

XML = """<testsuites><testsuite>
<testcase file="tests/test_a.py" name="test_one" />
<testcase file="tests/test_a.py" name="test_two[a|b]"><failure /></testcase>
<testcase file="tests/test_a.py" name="test_three"><skipped /></testcase>
<testcase file="tests/test_b.py" name="x"><error /></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def cell(tmp_path):
    folder = tmp_path / "state" / "newest-3.12"
    folder.mkdir(parents=True)
    files = {
        "commit": "0123abcd\n",
        "date": "2026-11-28\n",
        "tests.install": "Successfully installed torch\n",
        "tests.versions": "python 3.12.1\ntorch 2.15.0\ntorchao 0.18.0\n",
        "tests.xml": XML,
        "torchtune.install": "ERROR: Cannot install a and b because of conflicting dependencies.\nERROR: Rest\n",
        "commands": "passed train\nfailed infer --tp 2\n",
        "seconds": "480\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def rendered(cell):
    page = cell.parent / "page.md"
    page.write_text(f"above\n{BEGIN}old\n{END}\nbelow\n")
    record = cell.parent / "record.json"
    record.write_text('{"torchtitan": "0.2.2", "tested": []}')
    main(cell.parent, ["newest-3.12", "pinned-3.13"], page, record)
    return page.read_text()


def test_a_cell_counts_and_lists_what_failed(cell):
    text = rendered(cell)
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| newest-3.12"))
    pip = "cannot be installed together (`Cannot install a and b because of conflicting dependencies.`) with torchtune"
    assert f"| 1 passed, 2 failed, 1 skipped; {pip} |" in row
    assert "| 2.15.0 | 0.18.0 |" in row and "| 1 passed, 1 failed | 0123abcd, 2026-11-28 |" in row
    failures = ["`tests/test_a.py::test_two[a|b]`", "`tests/test_b.py::x`", "`titan infer --tp 2`"]
    assert [line for line in text.splitlines() if line.startswith("- ")] == [f"- newest-3.12: {x}" for x in failures]
    recorded = json.loads((cell.parent / "record.json").read_text())
    assert recorded["torchtitan"] == "0.2.2" and [(x["cell"], x["torch"]) for x in recorded["tested"]] == [
        ("newest-3.12", "2.15.0")
    ]


def test_torchtune_shows_the_torchao_that_it_came_with(cell):
    (cell / "torchtune.versions").write_text("python 3.12.1\ntorch 2.15.0\ntorchao 0.15.0\ntorchtune 0.6.1\n")
    assert "| 3.12.1 | 2.15.0 | 0.18.0 / 0.15.0 |  |  | 0.6.1 |" in rendered(cell)
    assert "did not finish with torchtune" in rendered(cell)


@pytest.mark.parametrize("missing", ["seconds", "tests.install"])
def test_a_cell_that_was_interrupted_is_not_run(cell, missing):
    (cell / missing).unlink()
    if missing == "tests.install":
        (cell / "torchtune.install").unlink()
    assert "| newest-3.12 |  |  |  |  |  |  | not run |  |  |" in rendered(cell)
    assert "| pinned-3.13 |  |  |  |  |  |  | not run |  |  |" in rendered(cell)


def test_a_cell_without_packages_or_python_says_so(cell):
    for name in ("seconds", "tests.versions", "torchtune.install"):
        (cell / name).unlink()
    (cell / "tests.install").write_text("ERROR: No matching distribution found for torch==2.99\n")
    assert "| not installed (`No matching distribution found for torch==2.99`) |" in rendered(cell)
    (cell / "tests.install").unlink()
    (cell / "no_interpreter").touch()
    assert "| newest-3.12 |  |  |  |  |  |  | no interpreter |  |  |" in rendered(cell)
