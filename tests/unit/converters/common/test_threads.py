"""Ctrl-C and SIGTERM while threads of a pool are in use."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from converters.common.threads import deferred_signals


class Ended(BaseException):
    """Raised by the handler below."""


def end_once(number: int, frame: FrameType | None) -> None:
    """Like the command line's handler of SIGTERM: a second signal must not interrupt the cleanup."""
    signal.signal(number, signal.SIG_IGN)
    raise Ended


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, end_once)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_within_the_block_is_handled_at_its_end(handler: None) -> None:
    steps = []
    with pytest.raises(Ended), deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        steps.append("after the signal")
    assert steps == ["after the signal"]


def test_a_signal_is_handled_where_the_block_allows_it(handler: None) -> None:
    with pytest.raises(Ended), deferred_signals() as deliver_signals:
        signal.raise_signal(signal.SIGTERM)
        deliver_signals()
        pytest.fail("the handler did not run")


@pytest.mark.parametrize("within", [True, False])
def test_a_handler_that_replaces_itself_stays_replaced(handler: None, within: bool) -> None:
    with pytest.raises(Ended), deferred_signals() as deliver_signals:
        signal.raise_signal(signal.SIGTERM)
        if within:
            deliver_signals()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_without_a_signal_the_handlers_are_restored(handler: None) -> None:
    with deferred_signals():
        assert signal.getsignal(signal.SIGTERM) is not end_once
    assert signal.getsignal(signal.SIGTERM) is end_once
