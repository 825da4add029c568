"""Signals that ask us to end may come in any number, at any moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from loadpeak_exporter.ab.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    with Interrupts() as noted:
        yield noted


def test_signals_are_only_counted_where_nothing_may_be_left_half_done(interrupts: Interrupts) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)
    assert interrupts.asked
    assert interrupts.hurried


def test_only_the_first_of_several_is_raised(interrupts: Interrupts) -> None:
    raised = 0
    with interrupts.raised():
        for _ in range(3):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raised += 1
    assert raised == 1
    assert interrupts.hurried


def test_what_came_before_is_raised_where_it_may_be(interrupts: Interrupts) -> None:
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        pytest.fail("nothing more may be begun")
    assert not interrupts.hurried


def test_signal_that_we_were_told_to_ignore_has_no_effect() -> None:
    """As ``nohup`` does it, so that the end of the terminal is not that of the experiment."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.raised():
            signal.raise_signal(signal.SIGHUP)
            assert not interrupts.asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
