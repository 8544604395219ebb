"""Today's behaviour is the recorded one: exit codes, JSON keys, output bytes, options, and resumed runs of old folders.

Where a test fails, `python -m tests.recording.record SECTION` shows the same diff; record.py's docstring says when the
recording may be rewritten.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("section", ["options", "commands", "folders"])
def test_behaviour_is_the_recorded_one(section):
    """In a process of its own: its processor settings must be there before torch is loaded."""
    command = [sys.executable, "-m", "tests.recording.record", section]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
