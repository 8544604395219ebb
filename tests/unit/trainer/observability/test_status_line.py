"""The line of progress on a terminal, and that it disturbs no other line."""

import io
import os
import pty
import select
import sys
from contextlib import contextmanager

import pytest

from trainer.observability import status_line
from trainer.observability.log import note, phase
from trainer.observability.sinks import ConsoleSink
from trainer.observability.status_line import StepProgress, is_possible

ERASE = "\r\033[2K"
METRICS = {"validation_loss": 2.0, "validation_perplexity": 7.4}


@contextmanager
def on_terminal():
    """Both streams are a terminal. Yields a function that reads what was written to it."""
    mine, theirs = pty.openpty()

    def read():
        written = os.read(mine, 1 << 16)
        while select.select([mine], [], [], 0.02)[0]:  # two writes may arrive one after the other
            written += os.read(mine, 1 << 16)
        return written.decode().replace("\r\n", "\n")

    with pytest.MonkeyPatch.context() as patch, os.fdopen(theirs, "w") as stream:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(sys, "stdout", stream)
        patch.setattr(status_line, "_shown", False)
        patch.setenv("TERM", "xterm")
        yield read
    os.close(mine)


def _progress(*secs):
    return StepProgress(40, clock=iter(secs).__next__)


def test_steps_and_the_time_that_is_left():
    progress = _progress(100.0, 102.0, 102.05)
    with on_terminal() as read:
        progress.update(1)
        assert read() == f"{ERASE}step      1  [{' ' * 30}] 2% of 40 steps\r"
        progress.update(10)  # nine steps in two seconds, thirty are left
        assert read() == f"{ERASE}step     10  [{'=' * 7}{' ' * 23}] 25% of 40 steps  ETA 0:00:07\r"
        progress.update(11)  # too soon
        note("a line")
        assert read() == f"{ERASE}a line\n"


def test_lines_replace_it_and_are_whole():
    with on_terminal() as read:
        _progress(100.0).update(1)
        read()
        ConsoleSink(prefix="", color=False, num_steps=40, unit="tokens", units_per_step=8).log(10, METRICS)
        note("saved")
        assert read() == f"{ERASE}step     10  held-out loss 2.0000  perplexity 7.40\nsaved\n"


def test_a_log_in_a_file_gets_no_control_characters(monkeypatch, tmp_path):
    with on_terminal(), (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        _progress(100.0).update(1)
        ConsoleSink(prefix="", color=True, num_steps=40, unit="tokens", units_per_step=8).log(10, METRICS)
    assert (tmp_path / "log").read_text() == "step     10  held-out loss 2.0000  perplexity 7.40\n"


def test_it_needs_a_terminal_that_replaces_lines(monkeypatch):
    with on_terminal():
        assert is_possible()
        monkeypatch.setenv("TERM", "dumb")
        assert not is_possible()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not is_possible()


def test_only_a_phase_that_takes_long_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # capsys loses what a thread writes while it is read
    monkeypatch.setattr("trainer.observability.log.SLOW_SECS", 0.01)
    monkeypatch.delenv("RANK", raising=False)
    with phase("building"):
        while "\n" not in sys.stderr.getvalue():
            pass
    assert sys.stderr.getvalue() == "building …\n"
    monkeypatch.setattr("trainer.observability.log.SLOW_SECS", 60)
    with phase("reading"):
        pass
    assert sys.stderr.getvalue() == "building …\n"
