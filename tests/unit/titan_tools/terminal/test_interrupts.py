"""Ctrl-C and SIGTERM end a command during imports, in `__del__` and in garbage collection callbacks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_tools.terminal.interrupts import exit_on_interrupt

ROOT = Path(__file__).resolve().parents[3]
SWALLOWS_DURING_IMPORT = """
import os, signal
from titan_tools.terminal.interrupts import exit_on_interrupt
signal.signal(signal.SIGINT, {handler})
with exit_on_interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass
print("continued")
"""


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("signal.default_int_handler", (130, "", "error: interrupted\n")),
        ("signal.SIG_IGN", (0, "continued\n", "")),
        ("lambda *_: print('handled')", (0, "handled\ncontinued\n", "")),
    ],
    ids=["default", "ignored", "another's"],
)
def test_an_interrupt_cannot_be_swallowed_and_other_handlers_stay(handler, expected):
    code = SWALLOWS_DURING_IMPORT.format(handler=handler)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_with_json_an_early_interrupt_is_an_object():
    code = SWALLOWS_DURING_IMPORT.format(handler="signal.default_int_handler")
    done = subprocess.run([sys.executable, "-c", code, "--json"], capture_output=True, text=True, timeout=60)
    error = {"kind": "interrupted", "message": "interrupted", "hint": "", "exit_code": 130}
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (130, {"error": error}, "error: interrupted\n")


def test_a_rank_leaves_the_message_to_its_parent():
    code = SWALLOWS_DURING_IMPORT.format(handler="signal.default_int_handler")
    environment = os.environ | {"TITAN_LAUNCH": str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_later_interrupts_are_exceptions_again():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ImportError), exit_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            raise ImportError
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


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
    print("continued")

def collecting(**_):
    interrupt.is_due = True
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(60)
    print("continued")

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.app = {work}
cli.main()
"""


@pytest.mark.parametrize("work", ["command", "collecting"])
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("SIGINT", 130, "error: interrupted\n"), ("SIGTERM", 143, "error: ended by SIGTERM\n")],
)
def test_a_signal_ends_the_command_although_its_exception_is_ignored(name, code, message, work):
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS.format(name=name, work=work)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


def test_other_ignored_exceptions_are_printed():
    code = """
from titan_tools.terminal.interrupts import resend_swallowed_signals

class Fails:
    def __del__(self):
        raise ValueError("of its own")

resend_swallowed_signals({KeyboardInterrupt: (2, None)})
Fails()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "ValueError: of its own" in done.stderr and "Exception ignored in" in done.stderr
