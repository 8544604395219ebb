"""Ctrl-C while modules are imported ends the process, also where what is imported swallows it."""

import os
import signal
import subprocess
import sys

import pytest

from titan_tools.early_interrupts import interrupts_end_it

SWALLOWS = """
import os, signal
from titan_tools.early_interrupts import interrupts_end_it
signal.signal(signal.SIGINT, {handler})
with interrupts_end_it():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass
print("went on")
"""


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("signal.default_int_handler", (130, "", "error: interrupted\n")),
        ("signal.SIG_IGN", (0, "went on\n", "")),
        ("lambda *_: print('told')", (0, "told\nwent on\n", "")),
    ],
    ids=["default", "ignored", "another's"],
)
def test_an_interrupt_cannot_be_swallowed_and_other_handlers_stay(handler, expected):
    code = SWALLOWS.format(handler=handler)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_a_rank_leaves_the_word_to_its_parent():
    code = SWALLOWS.format(handler="signal.default_int_handler")
    environment = os.environ | {"TITAN_LAUNCH": str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_later_interrupts_are_exceptions_again():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ImportError), interrupts_end_it():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            raise ImportError
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
