"""A conversation at a real terminal: typed lines, Ctrl-C and Ctrl-D, with ranks that share the keyboard."""

import os
import pty
import select
import sys
import termios
import time
from contextlib import suppress

import pytest

from tests.unit.titan_tools.infer.tasks.test_chat import write_checkpoint

pytestmark = pytest.mark.slow
CTRL_C, CTRL_D = b"\x03", b"\x04"
SETTLE_SECS = 0.1  # Python's input() misses a signal that comes just after it has shown its prompt


class Terminal:
    """`titan infer FOLDER --chat …` on a pseudo terminal."""

    def __init__(self, folder, *options):
        self.pid, self.keys = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "titan_tools", "infer", str(folder), "--chat", *options])

    def type(self, data):
        os.write(self.keys, data)

    def read_until(self, what, *, secs=120):
        seen, end = b"", time.monotonic() + secs
        while what not in seen:
            ready, _, _ = select.select([self.keys], [], [], max(0, end - time.monotonic()))
            assert ready, seen.decode()
            try:
                seen += os.read(self.keys, 4096)
            except OSError:  # EIO: it has ended
                raise AssertionError(seen.decode()) from None
        return seen.decode()

    def wait(self):
        """What is still shown, and the exit code."""
        seen = b""
        with suppress(OSError):  # EIO: the other side is closed
            while data := os.read(self.keys, 4096):
                seen += data
        return seen.decode(), os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def shows_keys(self):
        flags = termios.tcgetattr(self.keys)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_checkpoint(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "TITAN_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("tp", [1, 2])
def test_lines_are_answered_until_ctrl_d(folder, tp):
    terminal = Terminal(folder, "--max-new-tokens", "5", "--tp", str(tp))
    assert "256 tokens of context" in terminal.read_until(b"> ")
    answers = []
    for line in (b"hello", b"/reset", b"hello"):
        terminal.type(line + b"\n")
        answers.append(terminal.read_until(b"> "))
    assert answers[0] == answers[2] != answers[1] and "(cut after 5 tokens)" in answers[0]
    terminal.type(CTRL_D)
    rest, exit_code = terminal.wait()
    assert exit_code == 0 and f"tp {tp}" in rest and "2 completions" in rest


def test_ctrl_c_stops_an_answer_then_leaves(folder):
    terminal = Terminal(folder, "--ignore-eos")
    terminal.read_until(b"> ")
    terminal.type(b"hello\n")
    terminal.read_until(b"hello\r\n")
    time.sleep(0.02)
    terminal.type(CTRL_C)
    assert "(stopped)" in terminal.read_until(b"> ")
    terminal.type(b"/retry\n")
    assert "(cut after" in terminal.read_until(b"> ")
    time.sleep(SETTLE_SECS)
    terminal.type(CTRL_C)
    rest, exit_code = terminal.wait()
    assert exit_code == 130 and "\nerror: interrupted" in rest and "Traceback" not in rest


@pytest.mark.parametrize("when", ["answering", "waiting"])
def test_ctrl_c_ends_ranks_and_leaves_the_terminal_as_it_was(folder, when):
    terminal = Terminal(folder, "--ignore-eos", "--tp", "2")
    assert terminal.shows_keys
    terminal.read_until(b"> ")
    if when == "answering":
        terminal.type(b"hello\n")
        terminal.read_until(b"hello\r\n")
    else:
        time.sleep(SETTLE_SECS)
    terminal.type(CTRL_C)
    started = time.monotonic()
    keeps_showing = terminal.shows_keys
    rest, exit_code = terminal.wait()
    assert exit_code == 130 and "interrupted" in rest and "Traceback" not in rest
    assert keeps_showing and time.monotonic() - started < 30  # when torch's agent kills what has not ended
