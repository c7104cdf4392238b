"""The first signal asks, the second one ends; a program's own handlers stay."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from instep.launch.signals import (
    hear_stop_signals,
    listen_for_preemption,
    outlive_stop_signals,
    preempted,
)

pytestmark = pytest.mark.usefixtures("hangups_are_heard")
POLITE = [signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """Also where the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("numbers", "asks"),
    [(POLITE, "SIGTERM"), (POLITE[::-1], "SIGUSR1"), (POLITE[:1] * 2, "SIGTERM"), ([signal.SIGHUP], None)],
)
def test_the_first_signal_asks_by_name_and_the_last_one_unwinds_undisturbed(
    numbers: list[signal.Signals], asks: str | None
) -> None:
    asked: list[str | None] = []

    def receive() -> None:
        try:
            for number in numbers:
                signal.raise_signal(number)
        finally:
            asked.append("cleaning up")
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            asked.append("cleaned up")

    with pytest.raises(SystemExit) as ended, preempted(asked.append):
        receive()
    assert ended.value.code == 128 + numbers[-1]
    assert asked == [*([asks] if asks else []), "cleaning up", "cleaned up"]
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in POLITE)


def test_outside_of_the_main_thread_nothing_is_touched() -> None:
    def elsewhere() -> None:
        with preempted(lambda name: None):
            listen_for_preemption(lambda name: None)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in POLITE)


def own_handler() -> list[int]:
    own: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: own.append(number))
    return own


def keeps_the_programs_handlers() -> None:
    own = own_handler()
    with preempted(lambda name: os._exit(1)):
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert own == [signal.SIGUSR1] * 2


def is_asked_once_and_ended_by_the_second_signal() -> None:
    asked: list[str] = []
    listen_for_preemption(asked.append)
    signal.raise_signal(signal.SIGUSR1)
    assert asked == ["SIGUSR1"]
    signal.raise_signal(signal.SIGTERM)


def keeps_a_ranks_handler_after_the_first_signal() -> None:
    own = own_handler()
    listen_for_preemption(lambda name: None)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)
    assert own == [signal.SIGUSR1]


def ignores_hangups_and_is_preempted_all_the_same() -> None:
    for number in (*POLITE, signal.SIGHUP, signal.SIGINT):  # as a parent may leave them
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    hear_stop_signals()
    asked: list[str] = []
    with preempted(asked.append):
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
            signal.raise_signal(number)
    assert asked == ["SIGUSR1"]


def is_ended_by_a_signal_after_it_stopped_listening() -> None:
    listen_for_preemption(lambda name: None)()
    signal.raise_signal(signal.SIGTERM)


def keeps_handlers_that_the_program_sets_meanwhile() -> None:
    stop = listen_for_preemption(lambda name: None)
    own = own_handler()
    stop()
    signal.raise_signal(signal.SIGUSR1)
    assert own == [signal.SIGUSR1]


def leaves_its_children_as_they_were() -> None:
    listen_for_preemption(lambda name: os._exit(1))
    pid = os.fork()
    if not pid:
        signal.raise_signal(signal.SIGTERM)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def outlives_a_stop_signal_of_the_rank_that_it_serves() -> None:
    outlive_stop_signals()
    signal.raise_signal(signal.SIGTERM)


def is_ended_by_the_second_stop_signal() -> None:
    outlive_stop_signals()
    for number in POLITE:
        signal.raise_signal(number)
    threading.Event().wait()


def is_ended_in_time_after_a_stop_signal() -> None:
    outlive_stop_signals(grace_s=0.0)
    signal.raise_signal(signal.SIGUSR1)
    threading.Event().wait()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (leaves_its_children_as_they_were, 0),
        (outlives_a_stop_signal_of_the_rank_that_it_serves, 0),
        (is_ended_by_the_second_stop_signal, 128 + signal.SIGTERM),
        (is_ended_in_time_after_a_stop_signal, 128 + signal.SIGTERM),
        (keeps_the_programs_handlers, 0),
        (is_asked_once_and_ended_by_the_second_signal, 128 + signal.SIGTERM),
        (keeps_a_ranks_handler_after_the_first_signal, 0),
        (ignores_hangups_and_is_preempted_all_the_same, 0),
        (is_ended_by_a_signal_after_it_stopped_listening, -signal.SIGTERM),
        (keeps_handlers_that_the_program_sets_meanwhile, 0),
    ],
)
def test_a_process(body: Callable[[], None], code: int) -> None:
    pid = os.fork()
    if not pid:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
