"""The list of breaks is kept up with the code, and the tests see each break."""

import ast
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.breaks.breaks import PACKAGES, broken, find_tests, load_breaks

ROOT = Path(__file__).resolve().parents[2]
BREAKS = load_breaks()


def test_every_break_applies_once_and_names_tests_that_exist():
    problems = []
    for each in BREAKS:
        for look in (broken, find_tests):
            try:
                look(each, ROOT)
            except LookupError as error:
                problems.append(str(error))
    assert not problems, "\n".join(problems)


def test_a_broken_function_is_still_python():
    for each in BREAKS:
        assert each.old != each.new, each.name
        ast.parse(textwrap.dedent(broken(each, ROOT)[2]), each.name)


def test_there_are_at_least_100_over_all_packages():
    assert max(Counter(each.name for each in BREAKS).values()) == 1
    by_package = Counter(each.module.partition(".")[0] for each in BREAKS)
    assert by_package.keys() == set(PACKAGES)
    assert by_package.total() >= 100 and min(by_package.values()) >= 25


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tests_see_every_break():
    command = [sys.executable, ROOT / "tests/breaks/run.py", "--jobs", "2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
