"""Living processes are told from dead ones, and a wait that ends badly says who is missing from what."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from instep.errors import PeerLost
from instep.net import hang_report, peers
from instep.net import store as stores
from instep.net.hang_report import AFTER, IN, FlightRecorder, StatusRow
from instep.net.peers import RECORD_BYTES, Peer, Peers, is_alive, own_peer
from instep.net.store import StatusStore

ME = own_peer(0)
OPERATION = "the exchange of bucket 3"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has more than a second to answer: a busy machine is slow."""
    monkeypatch.setattr(stores, "PATIENCE_S", 20.0)


@contextmanager
def a_child(program: Path | str = "sleep") -> Iterator[subprocess.Popen]:
    """A process that waits until it is killed, and has become its program."""
    process = subprocess.Popen([program, "1000"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def peer_of(process: subprocess.Popen, rank: int = 1) -> Peer:
    return replace(ME, rank=rank, pid=process.pid, start_time=peers._start_time(process.pid) or 0)


def ended_but_not_reaped(process: subprocess.Popen) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def a_table(
    *others: Peer,
    timeout_s: float = 0.05,
    status_store: StatusStore | None = None,
    flight: FlightRecorder | None = None,
) -> Peers:
    return Peers([ME, *others], ME, timeout_s, status_store, flight)


def elsewhere(*ranks: int) -> list[Peer]:
    return [replace(ME, rank=rank, host="another") for rank in ranks]


def in_operation(number: int = 1) -> FlightRecorder:
    """A rank that has come to ``OPERATION`` as its ``number``-th."""
    flight = FlightRecorder(0)
    for _ in range(number):
        flight.begin(OPERATION)
    return flight


def absent(rank: int) -> Peer:
    """A rank that is a thread of this process: it lives, as far as one can see."""
    return replace(ME, rank=rank)


class Work:
    """Goes on for ``num_slices`` waits, then fails with ``error`` or is done; it takes no time."""

    def __init__(self, num_slices: float, error: str | None = None) -> None:
        self.num_slices = num_slices
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.num_slices > 0:
            self.num_slices -= 1
            raise RuntimeError("Timed out")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.num_slices <= 0 and self.error is not None


@pytest.mark.parametrize("host", ["node-7", "ноде-7", "h" * 64])
def test_a_record_arrives_as_it_was_sent(host):
    peer = Peer(70000, host, 4194304, 10**12, 4026531836, 2**64 - 1, 2**32 - 1)
    record = peer.to_bytes()
    assert len(record) == RECORD_BYTES
    assert Peer.from_bytes(record) == peer
    assert json.loads(record)["host"] == host


def test_a_host_name_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"host name of rank 3 is too long: \d+ of 256 bytes"):
        Peer(3, "長" * 60, 1, 1).to_bytes()


@pytest.mark.parametrize("reaped", [False, True])
def test_a_process_that_ended_does_not_live_not_even_as_a_zombie(reaped):
    with a_child() as process:
        peer = peer_of(process)
        assert is_alive(peer)
        ended_but_not_reaped(process)
        if reaped:
            process.wait()
        assert not is_alive(peer)


def test_a_stranger_with_the_same_id_is_not_the_peer():
    with a_child() as process:
        peer = peer_of(process)
        assert not is_alive(replace(peer, start_time=peer.start_time - 1))


def stopped(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_a_wait_for_a_rank_that_a_signal_has_stopped_names_it_long_before_the_deadline(monkeypatch):
    monkeypatch.setattr(peers, "STOPPED_S", 0.1)
    with a_child() as process:
        table = a_table(peer_of(process), timeout_s=30)
        stopped(process)
        with pytest.raises(PeerLost) as lost:
            table.wait(Slow(), OPERATION)
    assert lost.value.ranks == (1,)
    assert f"stopped by a signal: rank 1 (pid {process.pid} on " in str(lost.value)
    assert f"in {OPERATION}" in str(lost.value)
    assert f"kill -KILL {process.pid}" in str(lost.value)


class Slow(Work):
    """Goes on for ``seconds``; a wait for it takes as long as it is given."""

    def __init__(self, seconds: float = float("inf")) -> None:
        super().__init__(0)
        self.until = time.monotonic() + seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        threading.Event().wait(timeout.total_seconds() if timeout else 0)
        self.num_slices = int(time.monotonic() < self.until)
        return super().wait(timeout)


def test_a_stopped_rank_that_has_come_is_not_the_one_that_is_missing(monkeypatch):
    monkeypatch.setattr(peers, "STOPPED_S", 0.0)
    with a_child() as process:
        stopped(process)
        table = a_table(peer_of(process), absent(2), timeout_s=0.1)
        with pytest.raises(PeerLost, match="never came: rank 2"):
            table.wait(Work(float("inf")), OPERATION, missing=lambda: [2])


def test_only_a_signal_s_stop_counts_and_only_while_this_process_runs(monkeypatch):
    now, letters = [0.0], iter("TTtTTTTR")  # which restarts the clock: a debugger's stop is "t"
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(peers, "STOPPED_S", 0.18)
    monkeypatch.setattr(peers, "_letter", lambda peer: next(letters) if peer.rank else "S")

    class Paced(Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            now[0] += 0.05 if now[0] else 3600.0  # this process was stopped first, too
            return super().wait(timeout)

    with pytest.raises(PeerLost, match=r"stopped by a signal: rank 1 .* for 0\.2 s"):
        a_table(absent(1), timeout_s=60).wait(Paced(float("inf")), OPERATION)
    assert [*letters] == ["R"]


def test_time_in_which_this_process_did_not_run_is_no_rank_s_delay(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Paused(Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            now[0] += 3600.0
            return super().wait(timeout)

    a_table(absent(1), timeout_s=0.5).wait(Paused(3), OPERATION)


def test_a_name_with_brackets_and_blanks_does_not_confuse(tmp_path):
    program = tmp_path / "a) Z 1 (b"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with a_child(program) as process:
        assert is_alive(peer_of(process))
        assert peer_of(process).start_time > ME.start_time


def test_only_processes_that_can_be_seen_from_here_can_be_seen_to_be_dead():
    with a_child() as process:
        gone = peer_of(process, rank=1)
    hidden = [
        replace(gone, rank=2, host="another"),
        replace(gone, rank=3, pid_space=gone.pid_space + 1),  # a container that shares the host's name
        replace(gone, rank=4, start_time=0),  # a system without /proc
        absent(5),
    ]
    assert a_table(gone, *hidden).dead() == [1]


def test_who_waits_long_says_so_and_says_when_it_is_over(monkeypatch):
    monkeypatch.setattr(peers, "POST_S", 0.0)
    status_store = StatusStore(dist.HashStore())
    seen = []

    class Watched(Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            row = status_store.read(0)
            seen.append(row and (row.status, row.operation, row.number))
            return super().wait(timeout)

    table = a_table(*elsewhere(1), timeout_s=60, status_store=status_store, flight=in_operation(3))
    table.wait(Watched(2), OPERATION)
    assert seen == [None, (IN, OPERATION, 3), (IN, OPERATION, 3)]
    posted = status_store.read(0)
    assert posted is not None
    assert (posted.status, posted.operation) == (AFTER, OPERATION)
    assert "test_peers.py" in posted.site


def test_a_dead_rank_ends_the_wait_long_before_the_deadline():
    with a_child() as process:
        peer = peer_of(process)
        ended_but_not_reaped(process)
        with pytest.raises(PeerLost) as lost:
            a_table(absent(2), peer, timeout_s=1000).wait(Work(float("inf")), OPERATION)
    assert str(lost.value).startswith(f"rank 1 (pid {process.pid} on {ME.host}) died: rank 0 waited ")
    assert f" in {OPERATION}. If it raised, the cause stands in its own traceback; if it ended" in str(
        lost.value
    )
    assert (lost.value.ranks, lost.value.operation) == ((1,), OPERATION)


def test_what_a_rank_has_sent_before_it_ended_is_waited_for():
    with a_child() as process:
        peer = peer_of(process)
        ended_but_not_reaped(process)
        work = Work(1)
        a_table(peer, timeout_s=1000).wait(work, OPERATION)
    assert work.num_slices == 0


def test_past_the_deadline_those_who_are_behind_are_named_with_where_they_are():
    status_store = StatusStore(dist.HashStore())
    status_store.post(StatusRow(1, IN, OPERATION, 5))
    status_store.post(StatusRow(2, IN, "the exchange of bucket 4", 5))
    status_store.post(StatusRow(3, AFTER, "the exchange of bucket 2", 4))
    status_store.post(StatusRow(5, AFTER, "the exchange of bucket 4", 6))
    with a_child() as process:
        table = a_table(
            *elsewhere(1, 2, 3),
            peer_of(process, rank=4),
            *elsewhere(5),
            status_store=status_store,
            timeout_s=0.5,
            flight=in_operation(5),
        )
        began = time.monotonic()
        with pytest.raises(PeerLost) as lost:
            table.wait(Work(float("inf")), OPERATION)
    assert time.monotonic() - began >= 0.5
    sentence, *lines = str(lost.value).splitlines()
    assert lost.value.ranks == (2, 3, 4)
    assert f"in {OPERATION}, and never came: rank 2 (pid" in sentence
    assert "on another host, in the exchange of bucket 4; rank 3" in sentence
    assert "on another host, after the exchange of bucket 2; rank 4" in sentence
    assert f"(pid {process.pid} on {ME.host}), alive, gives no answer. Look there" in sentence
    assert sentence.endswith("or raise timeout_s (0.5 s)")
    assert lines[-1].startswith(
        f"rank 2, rank 3, rank 4 never came to {OPERATION}. Look there for other code"
    )
    assert lines[-1].endswith("or raise timeout_s (0.5 s)")
    assert [line.split()[0] for line in lines[1:7]] == ["2", "3", "4", "0", "1", "5"]
    assert lines[3].split() == ["4", "never", "came", "sleeping"]
    assert (
        "rank 4 gives no answer: its main thread is in native code that holds the interpreter lock" in lines
    )


@pytest.mark.parametrize(
    ("posted", "teller"),
    [
        ({1: 3.0, 2: 2.0}, 0),
        ({1: -1.0, 2: -3.0}, 2),  # whose deadline passes before that of the others
        ({1: -0.02, 2: 1.0}, 0),  # almost at once: the lowest
        ({2: -1.02, 3: -1.0}, 2),
    ],
)
def test_of_ranks_that_wait_for_the_same_one_one_shows_where_all_stand(posted, teller):
    status_store = StatusStore(dist.HashStore())
    flight = in_operation(5)
    began = flight.row().since
    for rank, later_s in posted.items():
        status_store.post(StatusRow(rank, IN, OPERATION, 5, since=began + later_s))
    of_all = a_table(*elsewhere(1, 2, 3, 4), timeout_s=0.1, status_store=status_store, flight=flight)
    with pytest.raises(PeerLost, match="Look there for other code") as lost:
        of_all.wait(Work(float("inf")), OPERATION)
    _, *table = str(lost.value).splitlines()
    assert lost.value.ranks[-1] == 4
    if teller == 0:
        assert table[0].startswith("rank  where")
    else:
        assert not table and str(lost.value).endswith(f". Rank {teller} shows where each rank stands")


def test_who_waits_speaks_for_a_neighbour_that_does_not_know_that_it_is_missed():
    status_store = StatusStore(dist.HashStore())
    silent = FlightRecorder(1)
    silent.begin("the exchange of bucket 2")
    silent.end()
    near, [far] = own_peer(1), elsewhere(2)
    table = a_table(near, far, timeout_s=0.1, status_store=status_store, flight=in_operation())
    hang_report.publish_flight(silent, near, table._group)
    with pytest.raises(PeerLost):
        table.wait(Slow(), OPERATION)
    posted = status_store.read(1)
    assert posted is not None
    assert (posted.status, posted.operation, posted.number) == (AFTER, "the exchange of bucket 2", 1)
    assert any("test_who_waits_speaks" in line for line in posted.stack)
    assert status_store.read(2) is None


def test_a_rank_of_another_host_that_was_reported_lost_ends_the_wait(monkeypatch):
    monkeypatch.setattr(peers, "LOOK_S", 0.0)
    status_store = StatusStore(dist.HashStore())
    table = a_table(*elsewhere(1, 2), timeout_s=1000, status_store=status_store)
    status_store.report_lost([2], dead=False)
    with pytest.raises(PeerLost, match=rf"^rank 2 \(pid \d+ on another\) left {OPERATION}: rank 0 waited"):
        table.wait(Slow(), OPERATION)
    status_store.report_lost([1], dead=True)
    with pytest.raises(PeerLost, match=r"^rank 1 \(pid \d+ on another\) died: rank 0 waited") as lost:
        table.wait(Slow(), OPERATION)
    assert lost.value.ranks == (1,)


def test_a_neighbour_that_has_left_ends_the_wait_too(monkeypatch):
    monkeypatch.setattr(peers, "LOOK_S", 0.0)
    gone, near = FlightRecorder(1), own_peer(1)
    gone.begin(OPERATION)
    gone.leave()
    table = a_table(near, timeout_s=5, flight=in_operation())
    hang_report.publish_flight(gone, near, table._group)
    with pytest.raises(PeerLost, match=rf"^rank 1 .* left {OPERATION}: rank 0 waited") as lost:
        table.wait(Slow(), OPERATION)
    assert lost.value.ranks == (1,)


def test_what_the_backend_says_is_quoted_when_nobody_is_seen_dead(monkeypatch):
    monkeypatch.setattr(peers, "CONFIRM_S", 0.0)
    said = "[pair.cc:553] Connection closed by peer [127.0.0.1]:7\n and a stack of ten lines"
    with pytest.raises(PeerLost) as lost:
        a_table(absent(1), timeout_s=60).wait(Work(2, said), OPERATION)
    assert f"a rank left {OPERATION}: rank 0 waited" in str(lost.value)
    assert str(lost.value).endswith(
        "then the backend said: Connection closed by peer [127.0.0.1]:7. The cause stands in "
        "the traceback of a rank that has another error than PeerLost"
    )
    assert lost.value.ranks == ()
    assert isinstance(lost.value.__context__, RuntimeError)


def test_a_closed_connection_whose_process_is_gone_is_a_death():
    with a_child() as process:
        peer = peer_of(process)
        ended_but_not_reaped(process)
        with pytest.raises(PeerLost, match=rf"^rank 1 \(pid {process.pid} on .*\) died") as lost:
            a_table(peer).wait(Work(0, "Connection closed by peer"), OPERATION)
    assert lost.value.ranks == (1,)


def test_another_thread_can_give_a_wait_up():
    table = a_table(absent(1), timeout_s=1000)

    class GivenUp(Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            table.given_up = True
            return super().wait(timeout)

    with pytest.raises(PeerLost, match=f"rank 0 gave up {OPERATION}"):
        table.wait(GivenUp(float("inf")), OPERATION)
