"""Signals that ask for a stop are remembered once, and then have their usual effect."""

import os
import signal

import pytest

from trainer.ranks import signals
from trainer.ranks.signals import StopRequest, interrupt_answer, lost_steps


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def stop(monkeypatch):
    """A request that listens, as on rank 0 of torchrun; this process lives on."""

    def end(code):
        raise Ended(code)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(signals.os, "_exit", end)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    request = StopRequest()
    request.listen()
    yield request
    for n, handler in before.items():
        signal.signal(n, handler)


def _press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_a_request_and_the_second_is_not_held_back(stop, number):
    assert not stop.requested
    os.kill(os.getpid(), number)
    assert stop.requested and not stop.by_user
    assert signal.getsignal(number) is signal.SIG_DFL


def test_before_a_step_is_done_ctrl_c_is_no_request(stop):
    with pytest.raises(KeyboardInterrupt):
        _press_ctrl_c()
    assert not stop.requested


@pytest.mark.parametrize("saves", [True, False])
def test_the_first_ctrl_c_is_a_request_and_the_second_ends_the_process(stop, monkeypatch, capfd, saves):
    stop.take_interrupts(saves=saves)
    stop.report_step(lost_steps(7, kept=2))
    clock = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    _press_ctrl_c()
    assert stop.requested and stop.by_user
    clock[0] += 0.5
    _press_ctrl_c()  # from torchrun, after the terminal's
    assert capfd.readouterr().err == interrupt_answer(saves=saves) + "\n"
    clock[0] += 0.6
    with pytest.raises(Ended, match="130"):
        _press_ctrl_c()
    assert capfd.readouterr().err == "ended at once: steps 3 to 7 are lost\n"


def test_sigterm_after_ctrl_c_ends_the_process(stop):
    """torchrun sends SIGINT for the first Ctrl-C and SIGTERM for the second."""
    stop.take_interrupts(saves=True)
    _press_ctrl_c()
    with pytest.raises(Ended, match="130"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_rank_of_titan_leaves_the_answer_to_its_parent(stop, capfd):
    told = []
    stop._tell_launcher = told.append
    stop.take_interrupts(saves=True)
    stop.report_step("step 1 is lost")
    _press_ctrl_c()
    assert told == ["step 1 is lost"] and stop.requested and capfd.readouterr().err == ""


def test_a_request_that_does_not_listen_leaves_ctrl_c_alone():
    """Ranks in threads, of which only the main one may install handlers."""
    before = signal.getsignal(signal.SIGINT)
    StopRequest().take_interrupts(saves=True)
    assert signal.getsignal(signal.SIGINT) is before
