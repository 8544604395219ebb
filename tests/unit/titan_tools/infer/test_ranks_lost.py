"""A process that waits within NCCL ends when another rank's process has, unless it is about to end by itself."""

import os
import signal
import time

import pytest

from titan_tools.infer import ranks
from titan_tools.infer.ranks import exit_with_lost_ranks


def in_a_fork(work) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(9)
    return child


@pytest.mark.parametrize(
    "how, code",
    [("in a block", 3), ("behind it", 5), ("about to end", 2), ("not watched", 5)],
)
def test_a_process_ends_with_another(monkeypatch, capfd, how, code):
    """The other one is ended; this one leaves with `code`."""
    other = in_a_fork(lambda: time.sleep(100))
    monkeypatch.setattr(ranks, "_POLL_MS", 20)
    monkeypatch.delenv("TITAN_LAUNCH", raising=False)
    monkeypatch.setattr(ranks, "_GRACE_SECS", 60 if how == "about to end" else 0.1)
    if how == "not watched":
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open("/nowhere", os.O_RDONLY))

    def watch():
        with exit_with_lost_ranks({other: 4}, rank=6):
            if how != "behind it":
                os.kill(other, signal.SIGKILL)
                time.sleep(100 if how == "in a block" else 0.3)  # which a watched process does not see the end of
            if how == "about to end":
                os._exit(2)
        if how == "behind it":
            os.kill(other, signal.SIGKILL)
            time.sleep(0.3)
        os._exit(5)

    started = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(in_a_fork(watch), 0)[1]) == code
    assert time.monotonic() - started < 50
    output = "error: rank 6 has lost rank 4, which ended\nhint: see its output\n"
    assert capfd.readouterr().err == (output if code == 3 else "")
    os.waitpid(other, 0)
