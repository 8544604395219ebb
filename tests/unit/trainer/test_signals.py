"""Signals that ask for a stop are remembered once, and then have their usual effect."""

import os
import signal

import pytest

from trainer.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_a_request_and_the_second_is_not_held_back(number):
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        stop = StopRequest()
        stop.listen()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
