"""Processes that stop after the same step: two of them as objects over one store, in every order of their calls."""

import os
import signal

import pytest

from jaxpipe.distributed.join import Store
from jaxpipe.distributed.process_group import Stop


@pytest.fixture
def both():
    store = Store()
    return Stop(store, process=0), Stop(store, process=1)


def send(stop, number):
    with stop:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_both_after_the_next_step(both, number):
    first, second = both
    for stop in both:
        stop.begin()
    send(second, number)
    assert not first.is_asked()
    assert not second.is_asked()  # the first may already have gone on
    for stop in both:
        stop.begin()
    assert first.is_asked()
    assert second.is_asked()
    assert first.reason == second.reason == f"process 1 got {signal.Signals(number).name}"


def test_one_that_is_late_to_ask_does_not_stop_a_step_before_the_other(both):
    fast, slow = both
    for stop in both:
        stop.begin()
    assert not fast.is_asked()
    send(fast, signal.SIGTERM)
    fast.begin()  # writes; the slow one has not asked yet
    assert not slow.is_asked()
    slow.begin()
    assert slow.is_asked()
    assert fast.is_asked()


def test_a_second_signal_puts_nothing_off(both):
    first, second = both
    send(first, signal.SIGTERM)
    for stop in both:
        stop.begin()
    send(first, signal.SIGTERM)
    assert first.is_asked()
    first.begin()  # the checkpoint
    assert second.is_asked()


def test_signals_in_both_stop_once(both):
    for stop in both:
        stop.begin()
        send(stop, signal.SIGTERM)
    for stop in both:
        stop.begin()
    assert all(stop.is_asked() for stop in both)
    assert both[0].reason == "process 0 got SIGTERM and process 1 got SIGTERM"


def test_handlers_are_given_back(both):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with both[0]:
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
