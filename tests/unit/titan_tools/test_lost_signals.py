"""Ctrl-C and SIGTERM end a command also where what they raise cannot come out."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SWALLOWS = """
import gc, os, signal, sys, time
from titan_tools import cli

def interrupt(*_):
    if interrupt.is_due:
        interrupt.is_due = False
        os.kill(os.getpid(), signal.{name})

class Swallows:
    def __del__(self):
        interrupt()

def command(**_):
    interrupt.is_due = True
    Swallows()
    time.sleep(60)
    print("went on")

def collecting(**_):
    interrupt.is_due = True
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(60)
    print("went on")

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.app = {work}
cli.main()
"""


@pytest.mark.parametrize("work", ["command", "collecting"])
@pytest.mark.parametrize(
    ("name", "code", "told"), [("SIGINT", 130, "error: interrupted\n"), ("SIGTERM", 143, "error: ended by SIGTERM\n")]
)
def test_a_signal_is_heard_though_what_it_raises_is_ignored(name, code, told, work):
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS.format(name=name, work=work)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)


def test_other_errors_that_are_ignored_are_printed_as_ever():
    code = """
from titan_tools.lost_signals import raise_lost_ones_again

class Fails:
    def __del__(self):
        raise ValueError("of its own")

raise_lost_ones_again({KeyboardInterrupt: (2, None)})
Fails()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "ValueError: of its own" in done.stderr and "Exception ignored in" in done.stderr
