"""A flight recorder costs little while all is well; the table shows the ranks that matter, of any number."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

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
    printable,
    status_table,
    words_of,
)
from instep.net.lane import Lane

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


@pytest.mark.parametrize("path", ["pipeline/runtime.py", "checkpoint/save.py", "run/step.py", "events.py"])
def test_no_file_of_the_library_is_the_line_of_the_program(path):
    there: dict[str, Any] = {}
    code = compile("import sys\ndef frame(): return sys._getframe()", str(hang_report._INSTEP / path), "exec")
    exec(code, there)
    assert hang_report._is_machinery(there["frame"]())


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


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("no route", "no route"),
        (
            "[/a/b/pair.cc:537] Read error [127.0.0.1]:22949: Connection reset by peer. This is typically "
            "caused by a remote worker hanging\n and a stack of ten lines",
            "Read error [127.0.0.1]:22949: Connection reset by peer",
        ),
    ],
)
def test_of_a_backend_s_error_its_own_words_are_told(said, words):
    assert words_of(RuntimeError(said)) == words


def test_a_row_arrives_as_it_was_sent():
    row = StatusRow(7, IN, "die Übertragung", 12, "float32 (3,)", 1e9 + 0.25, "a.py:1 f", ("x", "y"))
    assert StatusRow.from_bytes(row.to_bytes()) == row


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


@pytest.mark.parametrize(("text", "line"), [("a\tb", "a?b"), ("x" * TEXT_LIMIT, "x" * TEXT_LIMIT), (7, "7")])
def test_printable_is_one_line(text, line):
    assert printable(text) == line


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


def test_sixty_four_ranks_are_summed_up_with_the_odd_one_before_the_many():
    rows = [waiting(rank) for rank in range(62)]
    rows += [StatusRow(62, IN, "the exchange of bucket 3", 32), StatusRow(63, BEFORE, "any operation")]
    lines = status_table(rows, [63]).splitlines()
    assert [line.split()[0] for line in lines] == ["rank", "63", "62", "0", "1", "and", "rank"]
    assert lines[5].strip() == "and 60 more in the same place"


def test_many_absent_ranks_and_many_places_are_cut():
    rows = [StatusRow(rank, IN, f"operation {rank}", 1) for rank in range(20)]
    rows += [StatusRow(rank, AFTER, "x", 1, stack=(f"f{rank}",)) for rank in range(20, 64)]
    text = status_table(rows, range(20, 64))
    assert "and 36 more that never came: 28, 29, 30, 31, 32, 33, 34, 35 and 28 more" in text
    assert "and 14 more in other places" in text
    assert text.count("stands at") == 3
    assert len(text.splitlines()) < 30


def test_ranks_with_one_stack_share_it():
    rows = [StatusRow(rank, AFTER, "x", 1, stack=("main", "read")) for rank in (4, 5)]
    assert "rank 4, 5 stands at (innermost last):\n    main\n    read" in status_table(rows, [4, 5])


def test_a_rank_of_which_nothing_is_known_says_why():
    text = status_table(
        [StatusRow(0, state="disk"), StatusRow(1, state="elsewhere"), StatusRow(2, state="running")],
        [0, 1, 2],
    )
    assert "rank 0 gives no answer: its process waits for a disk" in text
    assert "rank 1 gives no answer: it is on another host" in text
    assert "rank 2 gives no answer: its main thread is in native code that holds the interpreter lock" in text
