"""The table shows those who matter, and is no wall however many ranks there are."""

from __future__ import annotations

import time
from dataclasses import replace

from instep.mesh.flight import AFTER, BEFORE, IN, Row
from instep.mesh.roll import table

OPERATION = "the exchange of bucket 2"


def waiting(rank: int, **others: object) -> Row:
    fields = {"what": "float32 (8,)", "site": "train.py:88 fit", "state": "sleeping", **others}
    return Row(rank, IN, OPERATION, 32, **fields)  # type: ignore[arg-type]


LIKE_THIS = """\
rank  where                     number  shape         site             seconds  state
   2  never came; after task 1      31                data.py:40 get      12.0  running
   0  in task 2                     32  float32 (8,)  train.py:88 fit     10.0  sleeping
   1  in task 2                     32  float32 (8,)  train.py:88 fit     10.0  sleeping
rank 2 stands at (innermost last):
    train.py:90 fit
    data.py:40 get
    its operations before, the last first: #30 a, #29 b"""


def test_a_table_reads_like_this(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1012.04)
    stack, recent = ("train.py:90 fit", "data.py:40 get"), ("#30 a", "#29 b")
    late = Row(2, AFTER, "task 1", 31, "", 1000.0, "data.py:40 get", stack, recent, "running")
    rows = [replace(waiting(rank, since=1002.0), operation="task 2") for rank in (0, 1)]
    assert table([*rows, late], [2]) == LIKE_THIS


def test_sixty_four_ranks_are_summed_up_with_the_odd_one_before_the_many():
    rows = [waiting(rank) for rank in range(62)]
    rows += [Row(62, IN, "the exchange of bucket 3", 32), Row(63, BEFORE, "any operation")]
    lines = table(rows, [63]).splitlines()
    assert [line.split()[0] for line in lines] == ["rank", "63", "62", "0", "1", "and", "rank"]
    assert lines[5].strip() == "and 60 more in the same place"


def test_many_absent_ranks_and_many_places_are_cut():
    rows = [Row(rank, IN, f"operation {rank}", 1) for rank in range(20)]
    rows += [Row(rank, AFTER, "x", 1, stack=(f"f{rank}",)) for rank in range(20, 64)]
    text = table(rows, range(20, 64))
    assert "and 36 more that never came: 28, 29, 30, 31, 32, 33, 34, 35 and 28 more" in text
    assert "and 14 more in other places" in text
    assert text.count("stands at") == 3
    assert len(text.splitlines()) < 30


def test_ranks_with_one_stack_share_it():
    rows = [Row(rank, AFTER, "x", 1, stack=("main", "read")) for rank in (4, 5)]
    assert "rank 4, 5 stands at (innermost last):\n    main\n    read" in table(rows, [4, 5])


def test_a_rank_of_which_nothing_is_known_says_why():
    text = table([Row(0, state="disk"), Row(1, state="elsewhere"), Row(2, state="running")], [0, 1, 2])
    assert "rank 0 gives no answer: its process waits for a disk" in text
    assert "rank 1 gives no answer: it is on another host" in text
    assert "rank 2 gives no answer: its main thread is in native code that holds the interpreter lock" in text
