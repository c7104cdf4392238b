"""Threads against processes: the same step, how much faster, and for what its threads waited."""

import statistics
import threading
import time
from dataclasses import asdict

import pytest
import torch

from instep.bench.data_parallel import LABELS, SETTINGS, WorkerResults, draw, notes
from instep.bench.steps_rank import measure_steps
from instep.bench.tables import short
from instep.bench.thread_clock import ThreadClock, ThreadTimes
from instep.bench.variants import DECLARED_THREADS, NONE, ONE, THREADS, WORKER_VARIANTS, SharedModel
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from tests.world import world

TINY = Workload("tiny", 200_000, batch=2, what="tiny", tokens=8)
ALONE = [ONE, THREADS, DECLARED_THREADS]


class RankZero:
    rank, size, device = 0, 2, torch.device("cpu")


def gradients(one):
    """What the optimizer is given in a step of ``one``."""
    runner = one.start(SharedModel(RankZero(), TINY))
    found = []
    runner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.extend(
            p.grad.clone() for group in optimizer.param_groups for p in group["params"]
        )
    )
    runner.step()
    return found


def test_one_process_and_its_threads_make_the_same_step():
    """The mean over the micro-batches: threads that are declared have its very bits."""
    expected, split, declared = map(gradients, ALONE)
    assert all(map(torch.equal, expected, declared))
    for a, b in zip(expected, split, strict=True):
        torch.testing.assert_close(a, b)


def busy(seconds):
    """Compute for so long, by the clock of this thread alone."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_thread_that_is_blocked_is_on_no_core():
    """Each of two threads computes for 10 ms, and one of them waits for the other meanwhile."""
    clock, begun, done = ThreadClock(), threading.Event(), threading.Event()

    def wait():
        with clock.as_lane("replica 0"):
            begun.set()
            done.wait()
            busy(0.01)

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun.wait()
    with clock.as_lane("replica 1"):
        busy(0.01)
    done.set()
    waiting.join()
    found = clock.take()
    assert found.on_core >= 0.02
    assert found.blocked + found.for_core == pytest.approx(found.computing - found.on_core)
    assert found.computing - found.on_core > 0.009
    assert clock.take() == ThreadTimes()


@world(2, by="process")
def test_every_round_says_what_became_of_the_time_of_threads(mesh):
    variants = [ONE, THREADS, NONE]
    task = {"workload": asdict(TINY), "variants": [asdict(one) for one in variants], "samples": 2}
    found = measure_steps(World(), task)
    for measured in found.values():
        assert len(measured["threads"]) == 2
        for times in measured["threads"]:
            assert 0 < times.on_core < times.computing + 1e-3  # the clocks are read one after the other
            assert times.for_core >= 0


def ranks_of(**by_name):
    """Two ranks with so many seconds of a step and of its threads, in each round."""
    measured = {
        name: dict(zip(("step_s", "threads"), zip(*rounds, strict=True), strict=True))
        for name, rounds in by_name.items()
    }
    return [measured, measured]


RESULTS = WorkerResults(
    ranks_of(
        one=[(2.0, [2.0, 1.9, 0.1])] * 3,
        threads=[(1.0, [1.0, 0.5, 0.25]), (2.0, [1.0, 0.5, 0.0]), (4.0, [1.0, 0.75, 0.0])],
    )
)


def test_the_time_that_is_neither_on_a_core_nor_for_want_of_one_is_blocked():
    blocked, queued = RESULTS.waited("threads")
    assert blocked == [0.25, 0.5, 0.25]
    assert queued == [0.25, 0.0, 0.0]
    assert RESULTS.waited("one")[0] == pytest.approx([0.0] * 3)


def test_speed_is_that_of_one_process_in_the_same_round():
    row = RESULTS.worker_row(THREADS, "tiny")
    assert (row["speed-up"], row["speed-up q25"], row["speed-up q75"]) == (1.0, 0.75, 1.5)
    assert row["lock(%)"] == 100 * statistics.median([0.25, 0.5, 0.25])
    assert short([row])[0]["speed-up"] == "1.00 (0.75 to 1.50)"


def test_every_way_has_a_label_and_is_drawn(tmp_path):
    assert set(LABELS) == set(WORKER_VARIANTS)
    rows = [
        {**RESULTS.worker_row(THREADS, what), "workers": label}
        for what in ("much Python", "little Python")
        for label in LABELS.values()
    ]
    results = {"ranks": 2, "samples": 3, "rows": rows, "ms": {name: {} for name in SETTINGS}}
    assert {path.suffix for path in draw(results, tmp_path / "chart.svg")} == {".svg", ".png"}
    assert any("lock" in note for note in notes(results))
