"""The progress table has a line for each worker, and columns that stand below each other."""

from __future__ import annotations

import os
from math import inf
from multiprocessing import Pipe
from pathlib import Path

from instep.elastic.heartbeat import PHASES, HeartbeatPage, Position
from instep.elastic.watchdog import Reading
from instep.elastic.worker_pool import Worker, progress_table
from instep.launch.rank_process import Child


def test_one_line_per_worker(page: HeartbeatPage) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        workers = [
            Worker(Child(number, 1, {}, page.file, page.file), pid, number, ours, page, rank=rank)
            for number, pid, rank in [(0, 11, 1), (1, 123456, 0), (7, 13, -1)]
        ]
        readings = {
            0: Reading(Position("exchange", 1.24, 12)),
            1: Reading(Position("forward", 30.06, 12), stopped_s=1.5),
            7: Reading(Position("built", 0.0, -1)),
        }
        text = progress_table(workers, readings)
    assert text.splitlines() == [
        "rank  pid     phase     seconds  steps",
        "1     11      exchange  1.2      12",
        "0     123456  forward   30.1     12     stopped for 1.5 s",
        "-     13      built     0.0      -1",
    ]


def test_a_worker_that_writes_in_a_phase_of_the_disk_is_not_idle(page: HeartbeatPage, tmp_path: Path) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        worker = Worker(Child(0, 1, {}, page.file, page.file), os.getpid(), 0, ours, page, generation=1)
        page.enter(0, PHASES.index("save"))
        assert worker.read(1, 0.0).idle_s == inf  # nothing to compare with
        (tmp_path / "file").write_bytes(b"x")
        assert worker.read(1, 0.0).idle_s == 0.0
        page.enter(0, PHASES.index("forward"))
        assert worker.read(1, 0.0).idle_s == inf  # who computes and reads may be stuck all the same
