"""A flight notes little while all is well, and tells where its rank stands when it is asked."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from instep.mesh.flight import (
    AFTER,
    ANY,
    BEFORE,
    FAILED,
    IN,
    NUM_FRAMES,
    NUM_RECENT,
    ROW_BYTES,
    TEXT_LIMIT,
    Flight,
    Row,
    printable,
)
from instep.work import Lane

PATIENCE_S = 20


def test_a_flight_goes_from_nothing_through_an_operation_to_its_end():
    flight = Flight(3)
    assert (flight.row().rank, flight.row().status, flight.row().operation) == (3, BEFORE, ANY)
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
    assert row.recent == ("#1 the gathering",)


def test_the_ring_is_short():
    flight = Flight(0)
    for i in range(100):
        flight.begin(f"operation {i}")
    assert flight.row().number == 100
    assert flight.row().recent == tuple(f"#{99 - i} operation {98 - i}" for i in range(NUM_RECENT))


def test_the_site_is_the_line_of_the_program_also_while_the_work_is_on_a_lane():
    flight, lane, go_on = Flight(0), Lane("a lane"), threading.Event()
    # Without a function of this file, whose frame would be the lane's own.
    lane.submit("to begin", partial(flight.begin, "on a lane")).wait(time.monotonic() + PATIENCE_S)
    held = lane.submit("to go on", partial(go_on.wait, PATIENCE_S))
    row = flight.row()
    go_on.set()
    held.wait()
    lane.close()
    assert row.status == IN
    assert "mesh/test_flight.py" in row.site
    assert "test_the_site_is_the_line" in row.stack[-4]
    assert row.stack[-3].endswith(" row")
    assert len(row.stack) <= NUM_FRAMES


def test_a_row_keeps_nothing_alive_of_what_it_has_seen():
    class Witness:
        pass

    def look() -> weakref.ref[Witness]:
        witness = Witness()
        Flight(0).row()
        return weakref.ref(witness)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


FINALIZERS_LET_GO_OF_THE_GIL = """
import faulthandler, gc, os, threading
from instep.mesh.flight import running_frames

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


def test_two_waits_at_a_time_are_told_by_the_older_one():
    flight = Flight(0)
    flight.waits("receive from rank 2", 2_000)
    thread = threading.Thread(target=flight.waits, args=("receive from rank 1", 1_000))
    thread.start()
    thread.join()
    assert (flight.row().status, flight.row().operation) == (IN, "receive from rank 1")


def test_a_row_arrives_as_it_was_sent():
    row = Row(7, IN, "die Übertragung", 12, "float32 (3,)", 1e9 + 0.25, "a.py:1 f", ("x", "y"), ("#11 z",))
    assert Row.from_bytes(row.to_bytes()) == row


def test_a_row_that_would_be_long_arrives_without_its_stack():
    row = Row(7, IN, "長" * TEXT_LIMIT, 1, "長" * TEXT_LIMIT, 0.0, "", ("長" * TEXT_LIMIT,) * 20)
    assert len(row.to_bytes()) <= ROW_BYTES
    assert Row.from_bytes(row.to_bytes()).operation == row.operation
    assert Row.from_bytes(row.to_bytes()).stack == ()


def test_what_a_peer_sends_cannot_steer_the_terminal_nor_fill_it():
    fields = json.loads(Row(1, IN, "x").to_bytes())
    fields |= {"operation": "\x1b[2J\n" + "long " * 1000, "stack": ["line\r\n"] * 50}
    row = Row.from_bytes(json.dumps(fields).encode())
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
        Row(1).to_bytes().replace(b'"since": 0.0', b'"since": []'),
        Row(1).to_bytes().replace(b'"stack": []', b'"stack": 3'),
        Row(1).to_bytes().replace(b'"number": 0', b'"number": 1e999'),
        b"[" * 5000,
    ],
)
def test_what_is_no_row_is_a_value_error(data):
    with pytest.raises(ValueError):
        Row.from_bytes(data)


@pytest.mark.parametrize(("text", "line"), [("a\tb", "a?b"), ("x" * TEXT_LIMIT, "x" * TEXT_LIMIT), (7, "7")])
def test_printable_is_one_line(text, line):
    assert printable(text) == line
