"""The first signal asks, the second one ends; what a program handles itself stays its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from instep.mesh.signals import hear_stop_signals, listen_for_preemption, preempted

pytestmark = pytest.mark.usefixtures("hangups_are_heard")
POLITE = [signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """Also where the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def receive(asked: list[str], *numbers: signal.Signals) -> None:
    """Get signals one after the other; the cleaning up gets more."""
    with preempted(asked.append):
        try:
            for number in numbers:
                signal.raise_signal(number)
        finally:
            asked.append("cleaning up")
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            asked.append("cleaned up")


@pytest.mark.parametrize(("first", "second"), [POLITE, POLITE[::-1], POLITE[:1] * 2])
def test_the_first_signal_asks_by_name_and_the_second_one_unwinds_undisturbed(
    first: signal.Signals, second: signal.Signals
) -> None:
    asked: list[str] = []
    with pytest.raises(SystemExit) as ended:
        receive(asked, first, second)
    assert ended.value.code == 128 + second
    assert asked == [first.name, "cleaning up", "cleaned up"]
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in POLITE)


def test_one_signal_unwinds_nothing() -> None:
    asked: list[str] = []
    with preempted(asked.append):
        signal.raise_signal(signal.SIGUSR1)
    assert asked == ["SIGUSR1"]


def test_a_terminal_that_goes_ends_at_once() -> None:
    asked: list[str] = []
    with pytest.raises(SystemExit) as ended:
        receive(asked, signal.SIGHUP)
    assert ended.value.code == 129
    assert asked == ["cleaning up", "cleaned up"]


def test_handlers_that_a_program_has_set_itself_stay() -> None:
    own: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: own.append(number))
    try:
        with preempted(lambda name: pytest.fail("asked")):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert own == [signal.SIGUSR1] * 2


def test_outside_of_the_main_thread_nothing_is_touched() -> None:
    def elsewhere() -> None:
        with preempted(lambda name: None):
            listen_for_preemption(lambda name: None)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in POLITE)


def fork(body: Callable[[], None]) -> int:
    """The exit code of ``body`` in a process of its own, which ends with 0 after it."""
    pid = os.fork()
    if not pid:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_rank_is_asked_once_and_ended_by_the_second_signal() -> None:
    def body() -> None:
        asked: list[str] = []
        listen_for_preemption(asked.append)
        signal.raise_signal(signal.SIGUSR1)
        if asked != ["SIGUSR1"]:
            os._exit(1)
        signal.raise_signal(signal.SIGTERM)

    assert fork(body) == 128 + signal.SIGTERM


def test_a_rank_s_own_handler_stays_after_the_first_signal() -> None:
    def body() -> None:
        own: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: own.append(number))
        listen_for_preemption(lambda name: None)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        os._exit(0 if own == [signal.SIGUSR1] else 1)

    assert fork(body) == 0


def test_a_command_that_was_told_to_ignore_hangups_does_and_is_preempted_all_the_same() -> None:
    def body() -> None:
        for number in (*POLITE, signal.SIGHUP, signal.SIGINT):  # as a parent may leave them
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
        hear_stop_signals()
        asked: list[str] = []
        with preempted(asked.append):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
        os._exit(0 if asked == ["SIGUSR1"] else 1)

    assert fork(body) == 0


def test_a_rank_that_listens_no_longer_is_ended_by_a_signal() -> None:
    def body() -> None:
        listen_for_preemption(lambda name: None)()
        signal.raise_signal(signal.SIGTERM)

    assert fork(body) == -signal.SIGTERM


def test_what_a_program_handles_meanwhile_is_not_taken_from_it() -> None:
    def body() -> None:
        own: list[int] = []
        give_back = listen_for_preemption(lambda name: None)
        signal.signal(signal.SIGUSR1, lambda number, frame: own.append(number))
        give_back()
        signal.raise_signal(signal.SIGUSR1)
        os._exit(0 if own == [signal.SIGUSR1] else 1)

    assert fork(body) == 0
