"""Today's behaviour is the recorded one: exit codes, JSON keys, output bytes, options, and resumed runs of old folders.

Where a test fails, `python -m tests.recording.record SECTION` shows the same lines; record.py's docstring says when the
recording may be rewritten.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.recording.record import changes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("section", ["options", "commands", pytest.param("folders", marks=pytest.mark.slow)])
def test_behaviour_is_the_recorded_one(section):
    """In a process of its own: its processor settings must be there before torch is loaded."""
    command = [sys.executable, "-m", "tests.recording.record", section]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


def test_what_differs_is_named_by_its_case_and_key():
    before = {"a": {"exit": 0, "json": ["x", "y"], "files": {"f": "1"}}, "b": 1}
    now = {"a": {"exit": 2, "json": ["x", "z"], "files": {"f": "2"}}}
    assert list(changes(before, now)) == [
        "a > exit: 0 → 2",
        "a > json: removed ['y'], added ['z']",
        "a > files > f: 1 → 2",
        "b: 1 → absent",
    ]
    assert list(changes(before, before)) == []
