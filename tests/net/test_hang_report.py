"""A process answers its peers while its program does something else; a table shows the ranks that matter."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from instep.net import hang_report
from instep.net.hang_report import (
    AFTER,
    BEFORE,
    FAILED,
    IN,
    LEFT,
    NUM_FRAMES,
    ROW_BYTES,
    TEXT_LIMIT,
    FlightRecorder,
    StatusRow,
    status_table,
)
from instep.net.lane import Lane
from instep.net.peers import Peer, own_peer
from instep.net.store import StatusStore
from tests.world import world

PATIENCE_S = 20


def test_a_flight_goes_from_nothing_through_an_operation_to_its_end():
    flight = FlightRecorder(3)
    assert (flight.row().rank, flight.row().status, flight.row().operation) == (3, BEFORE, "any operation")
    x = torch.ones(2, 5, dtype=torch.bfloat16)
    flight.begin("the gathering", (x.dtype, x.shape))
    row = flight.row()
    assert (row.status, row.operation, row.number, row.what) == (IN, "the gathering", 1, "bfloat16 (2, 5)")
    assert abs(row.since - time.time()) < 5
    flight.end()
    assert (flight.row().status, flight.row().number) == (AFTER, 1)
    flight.begin("the next")
    flight.end(failed=True)
    row = flight.row()
    assert (row.status, row.operation, row.number, row.what) == (FAILED, "the next", 2, "")
    flight.begin("the last")
    flight.leave()
    flight.end()
    assert (flight.row().status, flight.row().operation) == (LEFT, "the last")


@pytest.mark.parametrize("fails", [False, True])
def test_what_begins_inside_of_one_operation_is_a_part_of_it(fails):
    flight = FlightRecorder(0)
    with suppress(ArithmeticError), flight.as_one("the exchange"):
        flight.begin("a part")
        flight.end(failed=fails)
        assert (flight.row().status, flight.row().operation, flight.row().number) == (IN, "the exchange", 1)
        if fails:
            raise ArithmeticError
    assert (flight.row().status, flight.row().number) == (FAILED if fails else AFTER, 1)
    flight.begin("the next")
    assert (flight.row().operation, flight.row().number) == ("the next", 2)


def test_the_site_is_the_line_of_the_program_also_while_the_work_is_on_a_lane():
    flight, lane, go_on = FlightRecorder(0), Lane("a lane"), threading.Event()
    # Without a function of this file, whose frame would be the lane's own.
    lane.submit("to begin", partial(flight.begin, "on a lane")).arrive(PATIENCE_S)
    held = lane.submit("to go on", partial(go_on.wait, PATIENCE_S))
    row = flight.row()
    go_on.set()
    held.wait()
    lane.close()
    assert row.status == IN
    assert "net/test_hang_report.py" in row.site
    assert "test_the_site_is_the_line" in row.stack[-4]
    assert row.stack[-3].endswith(" row")
    assert len(row.stack) <= NUM_FRAMES


def test_the_site_is_in_the_thread_that_is_in_the_operation():
    flight, begun, go_on = FlightRecorder(0), threading.Event(), threading.Event()

    def elsewhere() -> None:
        flight.begin("in another thread")
        begun.set()
        go_on.wait(PATIENCE_S)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert begun.wait(PATIENCE_S)
    row = flight.row()
    go_on.set()
    thread.join()
    assert row.site.endswith(" elsewhere")


def test_a_row_keeps_nothing_alive_of_what_it_has_seen():
    class Witness:
        pass

    def look() -> weakref.ref[Witness]:
        witness = Witness()
        FlightRecorder(0).row()
        return weakref.ref(witness)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


FINALIZERS_LET_GO_OF_THE_GIL = """
import faulthandler, gc, os, threading
from instep.net.hang_report import running_frames

faulthandler.dump_traceback_later(30, exit=True)  # from a thread that needs no GIL

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        os.stat("/")

def look():
    for _ in range(4000):
        Cycle()
        running_frames()

gc.set_threshold(3)
threads = [threading.Thread(target=look) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
"""


def test_threads_that_look_at_all_frames_while_garbage_is_collected_do_not_stop_the_process():
    command = [sys.executable, "-c", FINALIZERS_LET_GO_OF_THE_GIL]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_longest_row_fits():
    line = "𝄞" * TEXT_LIMIT
    row = StatusRow(7, IN, line, 1, line, 0.0, line, (line,) * NUM_FRAMES)
    assert len(row.to_bytes()) <= ROW_BYTES
    assert StatusRow.from_bytes(row.to_bytes()) == row


def test_what_a_peer_sends_cannot_steer_the_terminal_nor_fill_it():
    fields = json.loads(StatusRow(1, IN, "x").to_bytes())
    fields |= {"operation": "\x1b[2J\n" + "long " * 1000, "stack": ["line\r\n"] * 50}
    row = StatusRow.from_bytes(json.dumps(fields).encode())
    assert row.operation.startswith("?[2J?long")
    assert len(row.operation) == TEXT_LIMIT
    assert row.stack == ("line??",) * NUM_FRAMES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"7",
        b"\xff",
        b"{}",
        b'{"rank": "x"}',
        StatusRow(1).to_bytes().replace(b'"since": 0.0', b'"since": []'),
        StatusRow(1).to_bytes().replace(b'"stack": []', b'"stack": 3'),
        StatusRow(1).to_bytes().replace(b'"number": 0', b'"number": 1e999'),
        b"[" * 5000,
    ],
)
def test_what_is_no_row_is_a_value_error(data):
    with pytest.raises(ValueError):
        StatusRow.from_bytes(data)


OPERATION = "the exchange of bucket 2"


def waiting(rank: int, **others: object) -> StatusRow:
    fields = {"what": "float32 (8,)", "site": "train.py:88 fit", "state": "sleeping", **others}
    return StatusRow(rank, IN, OPERATION, 32, **fields)  # type: ignore[arg-type]


LIKE_THIS = """\
rank  where                     number  shape         site             seconds  state
   2  never came; after task 1      31                data.py:40 get      12.0  running
   0  in task 2                     32  float32 (8,)  train.py:88 fit     10.0  sleeping
   1  in task 2                     32  float32 (8,)  train.py:88 fit     10.0  sleeping
rank 2 stands at (innermost last):
    train.py:90 fit
    data.py:40 get"""


def test_a_table_reads_like_this(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1012.04)
    stack = "train.py:90 fit", "data.py:40 get"
    late = StatusRow(2, AFTER, "task 1", 31, "", 1000.0, "data.py:40 get", stack, "running")
    rows = [replace(waiting(rank, since=1002.0), operation="task 2") for rank in (0, 1)]
    assert status_table([*rows, late], [2]) == LIKE_THIS


def test_a_rank_of_which_nothing_is_known_says_why():
    text = status_table(
        [StatusRow(0, state="disk"), StatusRow(1, state="elsewhere"), StatusRow(2, state="running")],
        [0, 1, 2],
    )
    assert "rank 0 gives no answer: its process waits for a disk" in text
    assert "rank 1 gives no answer: it is on another host" in text
    assert "rank 2 gives no answer: its main thread is in native code that holds the interpreter lock" in text


def test_a_flight_of_this_process_is_answered_without_a_detour_as_long_as_it_lives():
    flight, other, me = FlightRecorder(4), FlightRecorder(4), own_peer(4)
    hang_report.publish_flight(flight, me, "one group")
    hang_report.publish_flight(other, me, "another")
    flight.begin(OPERATION)
    assert hang_report.ask_peers([me], "one group", seconds=0.0)[4].operation == OPERATION
    assert hang_report.ask_peers([me], "another", seconds=0.0)[4].status == BEFORE
    assert hang_report.ask_peers([me], hang_report.LATEST, seconds=0.0)[4].operation == OPERATION
    del flight
    assert hang_report.ask_peers([me], "one group") == {}


def test_a_process_without_a_debug_server_is_not_waited_for():
    stranger = Peer(1, own_peer(0).host, os.getppid(), 1, 0)
    began = time.monotonic()
    assert hang_report.ask_peers([stranger], "a group", seconds=30) == {}
    assert time.monotonic() - began < 15


@world(2, by="process")
def test_a_process_that_computes_answers_with_its_stack(mesh, tmp_path):
    group, path = mesh.world.group, tmp_path / "asked"
    group.barrier(OPERATION)
    if mesh.rank == 0:
        while not (row := group.peers.rows()[1]).site.endswith(" compute_until"):
            pass
        path.touch()
        assert (row.rank, row.status, row.operation) == (1, AFTER, OPERATION)
        assert "net/test_hang_report.py" in row.site
        assert any(" test_a_process_that_computes" in line for line in row.stack)
        assert row.state in ("running", "sleeping")
    else:
        compute_until(path)
    group.barrier(OPERATION)


def compute_until(path):
    """Python code that never rests."""
    while not os.path.exists(path):
        pass


@world(2, by="process")
def test_a_process_that_holds_the_interpreter_lock_gives_no_answer(mesh, tmp_path):
    group, path = mesh.world.group, tmp_path / "go on"
    if mesh.rank == 0:
        os.mkfifo(path)
    group.barrier(OPERATION)
    pipe = os.open(path, os.O_RDWR)
    if mesh.rank == 1:
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # a call that keeps the lock
    else:
        while (row := group.peers.rows()[1]).status:
            pass
        os.write(pipe, b".")
        assert (row.rank, row.state, row.stack) == (1, "sleeping", ())
    group.barrier(OPERATION)
    os.close(pipe)


@world(4, dp=2, tp=2)
def test_groups_have_slices_of_one_table_and_their_own_rows(mesh):
    everyone, again = mesh.world.group.peers, mesh.world.duplicate()
    groups = [mesh.along[name].group for name in ("dp", "tp")]
    for group in (*groups, again):
        assert group.peers.table == tuple(everyone.table[rank] for rank in group.ranks)
        assert group.peers.flight.number == 0 < everyone.flight.number  # only the world has exchanged records
    groups[0].barrier(OPERATION)
    assert [row.operation for row in groups[0].peers.rows()] == [OPERATION] * 2
    assert [row.status for row in groups[1].peers.rows()] == [BEFORE] * 2
    again.barrier("the end")
    again.close()


def test_of_lost_ranks_the_first_report_counts_and_deaths_before_all():
    store = dist.HashStore()
    here, there = (StatusStore(store, rank) for rank in (0, 1))
    assert there.lost() == ([], False)
    assert here.report_lost([2], dead=False) == ([2], False) == there.lost()
    assert there.report_lost([0], dead=False) == ([2], False)
    assert there.report_lost([], dead=False) == ([2], False)
    assert there.report_lost([1, 3], dead=True) == ([1, 3], True) == here.lost()
    assert here.report_lost([0], dead=True) == ([1, 3], True)
