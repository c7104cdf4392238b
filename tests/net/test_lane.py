"""A lane runs functions in order, stops at the first failure, and does not outlive its owner."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from instep.errors import PeerLost
from instep.net.lane import Handle, Lane, Work

PATIENCE_S = 20


def fail(error: Exception) -> None:
    raise error


def nothing() -> None: ...


@pytest.fixture(params=[False, True], ids=["thread", "inline"])
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    lane = Lane("a test's", inline=request.param)
    yield lane
    lane.close()


@pytest.fixture
def threaded() -> Iterator[Lane]:
    lane = Lane("a test's")
    yield lane
    lane.close()


def test_running_a_function_inside_another_one_of_the_lane_is_refused_in_any_thread(threaded: Lane) -> None:
    """On an idle lane the caller's thread ran the outer function and waited for itself forever."""
    raised: list[str] = []

    def outer() -> None:
        with pytest.raises(RuntimeError) as error:
            threaded.run("the inner one", nothing)
        raised.append(str(error.value))

    threaded.run("the outer one", outer)
    threaded.submit("the outer one", outer).wait()
    assert (
        raised
        == ['the inner one was called inside a function of lane "a test\'s", which would wait for itself'] * 2
    )


class Gate:
    """Work that runs until ``open``."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self) -> None:
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def new_thread(use: Callable[[], object]) -> threading.Thread:
    """The thread that ``use`` started."""
    before = set(threading.enumerate())
    use()
    (thread,) = set(threading.enumerate()) - before
    return thread


def test_functions_run_in_the_order_they_were_submitted(lane):
    done: list[int] = []
    works = [lane.submit(f"number {i}", lambda i=i: done.append(i)) for i in range(100)]
    for work in works:
        work.wait()
    assert done == list(range(100))
    assert all(work.done() and work.error is None for work in works)


def test_after_a_failure_the_rest_is_refused_with_the_same_error_until_reset(lane):
    error, done = LookupError(), []
    lane.submit("before", lambda: done.append("before"))
    lane.submit("a search", lambda: fail(error))
    refused = [lane.submit("after", lambda: done.append("after")) for _ in range(3)]
    for work in refused:
        with pytest.raises(LookupError) as caught:
            work.wait()
        assert caught.value is error
    lane.reset()
    assert lane.failed is None
    lane.submit("again", lambda: done.append("again")).wait()
    assert done == ["before", "again"]


def test_what_was_queued_before_a_reset_is_still_refused(threaded):
    gate, done = Gate(), []
    threaded.submit("the gate", gate)
    threaded.submit("a search", lambda: fail(LookupError()))
    refused = threaded.submit("after", lambda: done.append("after"))
    threading.Timer(0, gate.open).start()
    threaded.reset()
    assert refused.done() and isinstance(refused.error, LookupError)
    assert done == []


def test_after_a_wait_the_lane_has_failed(threaded, monkeypatch):
    """Else a reset right after the wait could come before the failure, and the lane stay closed for good."""
    seen: list[BaseException | None] = []

    end = Work.end

    def watched(work: Work, error: BaseException | None = None) -> None:
        if work.operation == "a search":
            seen.append(threaded.failed)
        end(work, error)

    monkeypatch.setattr(Work, "end", watched)
    gate, error = Gate(), LookupError()
    threaded.submit("the gate", gate)
    work = threaded.submit("a search", lambda: fail(error))
    gate.open()
    with pytest.raises(LookupError):
        work.wait()
    assert seen == [error]


def test_a_closed_lane_ends_its_thread_after_what_is_queued_and_can_be_used_again():
    lane, gate, done = Lane("a test's"), Gate(), []
    thread = new_thread(lambda: lane.submit("the gate", gate))
    lane.submit("last", lambda: done.append("last"))
    threading.Timer(0, gate.open).start()
    lane.close()
    assert done == ["last"]
    assert not thread.is_alive()
    lane.close()
    lane.submit("again", lambda: done.append("again")).wait()
    lane.close()
    assert done == ["last", "again"]


def test_a_lane_that_can_get_no_thread_says_so_and_can_still_be_drained_and_closed(threaded, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threaded.submit("never", list)
    threaded.drain()
    threaded.close()


def test_run_comes_after_submitted_work(threaded):
    gate, done = Gate(), []
    threaded.submit("the gate", gate)
    threaded.submit("first", lambda: done.append("first"))
    threading.Timer(0, gate.open).start()
    threaded.run("second", lambda: done.append("second"))
    assert done == ["first", "second"]
    threaded.run("third", lambda: done.append(threading.current_thread()))
    assert done[2] is threading.current_thread()  # the queue is empty again


def test_functions_of_several_threads_never_overlap_on_one_lane(threaded):
    inside, overlaps, ended = [0], [], []

    def count() -> None:
        inside[0] += 1
        overlaps.append(inside[0] > 1)
        inside[0] -= 1

    def use() -> None:
        for n in range(200):
            (threaded.run if n % 3 else threaded.submit)("counting", count)
        ended.append(True)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threaded.drain()
    assert ended == [True] * 4
    assert overlaps == [False] * 800


def test_an_interrupt_is_raised_in_the_waiting_thread_and_later_work_is_refused(lane):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.run("a long search", interrupt).wait()
    for work in (lane.run("after", nothing), lane.submit("after", nothing)):
        with pytest.raises(RuntimeError, match="a long search was interrupted: KeyboardInterrupt"):
            work.wait()
    lane.reset()
    lane.run("again", nothing).wait()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("cause", [None, ConnectionError("closed by a peer")], ids=["alone", "with a cause"])
def test_an_error_does_not_keep_the_work_that_it_was_raised_through(cause):
    lost = PeerLost("rank 1 is lost", ranks=[1])
    lost.__cause__ = cause
    work = Work("a wait")
    work.end(lost)
    running = Handle(work)
    with pytest.raises(PeerLost if cause is None else ConnectionError) as caught:
        running.wait()
    assert str(caught.value) == str(cause or lost)
    assert getattr(caught.value, "ranks", (1,)) == (1,)
    kept = weakref.ref(running)
    del caught, running, work, lost
    assert kept() is None


class Owner:
    """Owns a lane, as a reducer does, and submits functions that hold it."""

    def __init__(self) -> None:
        self.lane = Lane("an owner's")

    def search(self, *, fails: bool) -> None:
        if fails:
            raise LookupError

    def use(self, *, fails: bool) -> threading.Thread:
        thread = new_thread(lambda: self.lane.submit("a search", lambda: self.search(fails=fails)))
        self.lane.drain()
        return thread


@pytest.mark.parametrize("fails", [False, True], ids=["idle", "failed"])
def test_the_thread_of_a_lane_that_is_collected_ends(fails):
    thread = Owner().use(fails=fails)
    until = time.monotonic() + PATIENCE_S
    while thread.is_alive() and time.monotonic() < until:
        gc.collect()  # the error's traceback and the owner hold each other
        thread.join(0.05)
    assert not thread.is_alive()
