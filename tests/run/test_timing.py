"""What ranks tell each other of their time, their memory, and the hashes of their micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep.events import GLOBAL_LOSS, GRADIENT_SYNC, PARAMETER_GATHER, STEP, Event, Recorder, Timeline
from instep.mesh.mesh import Mesh
from instep.replicate.gradient_hashes import GradientHashes
from instep.run.peak_memory import peak_memory, words
from instep.run.timing import LOOKED_AT, NUM_OWN, Timing
from instep.run.writer import gather_leaves
from instep.timeline.breakdown import parts
from instep.timeline.bubbles import bubbles
from instep.timeline.straggler import OwnTimes
from tests.run.text_training import STEPS, tiny, trained
from tests.world import world


class Played:
    """A clock that stands still unless it is told to go on, and a recorder by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1000
        monkeypatch.setattr("instep.events.time.monotonic_ns", lambda: self.now_ms * 1_000_000)
        self.recorder = Recorder(rank=1)

    def span(self, name: str, ms: int, lane: str = "host", **more: int) -> None:
        with self.recorder.span(name, lane=lane, **more):
            self.now_ms += ms

    def step(self, compute_ms: int = 30) -> None:
        """One micro-batch, after which the gradients travel for 5 ms."""
        self.span("data", 2, "data")
        self.span("forward", compute_ms // 3, "compute")
        self.span("backward", compute_ms - compute_ms // 3, "compute")
        self.span(GRADIENT_SYNC, 5)
        self.span("update", 3, "compute")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_a_ranks_own_figures_are_those_of_the_step_before_with_all_that_followed_it(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=2)
    timing.begin(0)
    assert timing.own == [0.0] * NUM_OWN
    played.step(compute_ms=30)
    timing.waits()
    played.span("ledger", 4)
    assert timing.own == [0.0] * NUM_OWN
    timing.begin(1)
    own = OwnTimes.from_list(timing.own)
    assert (own.rank, own.step, own.micro_batches) == (1, 0, 1)
    assert [own.compute, own.data, own.host, own.wall] == pytest.approx([0.030, 0.002, 0.004, 0.044])
    played.step(compute_ms=60)
    timing.waits()
    assert OwnTimes.from_list(timing.own) == own
    timing.begin(2)
    assert OwnTimes.from_list(timing.own).compute == pytest.approx(0.060)


def test_the_runs_own_work_is_no_host_code_of_the_script(played: Played) -> None:
    """Rank 0 writes the record and the snapshot: it is not slow by that."""
    timing = Timing(played.recorder, num_ranks=2)
    timing.begin(0)
    played.step()
    with timing.bookkeeping("snapshot"):
        played.now_ms += 30
    timing.waits()
    with timing.bookkeeping("ledger"):
        played.now_ms += 20
    played.span("print", 4)
    timing.begin(1)
    live = OwnTimes.from_list(timing.own)
    assert live.host == pytest.approx(0.004)
    assert live.wall == pytest.approx(0.094)
    timing.end()
    traced = parts([event for event in played.recorder.events if event.step == 0])
    assert traced is not None
    assert OwnTimes.of(traced).host == pytest.approx(0.004)


def test_no_time_between_two_steps_is_in_neither(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=1)
    for step in range(3):
        timing.begin(step)
        played.step()
        played.now_ms += 7  # of no span
    timing.end()
    ends = [event for event in played.recorder.events if event.name == STEP]
    assert [(e.start_ns, e.end_ns) for e in ends] == [
        (s * 10**6, (s + 47) * 10**6) for s in (1000, 1047, 1094)
    ]
    found = timing.breakdown()
    assert found.parts["unattributed"] == pytest.approx(0.007) and found.steps == 3


def test_waits_are_those_of_the_open_step_so_far(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=2)
    assert timing.waits() == (0, 0, 0)
    timing.begin(0)
    played.step()
    assert timing.waits() == pytest.approx((0.005, 0, 0))
    played.span("parameter update", 11, peer=0)
    assert timing.waits() == pytest.approx((0.005, 0.011, 0))
    timing.begin(1)
    assert timing.waits() == (0, 0, 0)


def test_the_breakdown_leaves_out_what_this_part_of_the_run_has_not_made(played: Played) -> None:
    """An earlier part made steps up to 6 with gathers; this one goes on after step 3, up to 5."""

    def make(steps: range, compute_ms: int, gathers: int) -> None:
        timing = Timing(played.recorder, num_ranks=1)
        for step in steps:
            timing.begin(step)
            played.span(PARAMETER_GATHER, gathers, "communication")
            played.step(compute_ms)
        timing.end()

    make(range(7), compute_ms=300, gathers=20)
    played.recorder.begin_step(7)
    played.span("forward", 500, "compute")  # and was killed in the middle of one
    played.recorder.drop_step()
    make(range(3, 6), compute_ms=60, gathers=0)
    found = Timing(played.recorder, num_ranks=1).breakdown(since=3)
    assert (found.steps, found.gathers_s) == (3, 0)
    assert found.wall_s == found.median_s == pytest.approx(0.070)
    assert found.parts["compute"] == pytest.approx(0.060)


def test_of_steps_that_are_made_again_the_last_time_counts(played: Played) -> None:
    timing = Timing(played.recorder, num_ranks=1)
    for steps, compute_ms in ((range(4), 30), (range(2, 4), 300)):
        for step in steps:
            timing.begin(step)
            played.step(compute_ms)
        timing.end()
    found = timing.breakdown()
    assert found.steps == 4 and found.parts["compute"] == pytest.approx((2 * 0.030 + 2 * 0.300) / 4)


def test_the_slow_rank_is_found_from_what_was_heard_and_ranks_without_a_step_count_for_nothing() -> None:
    timing = Timing(Recorder(), num_ranks=3)
    timing.heard([[0.0] * NUM_OWN] * 3)
    assert timing.slow() is None

    def own(rank: int, step: int, compute: float) -> list[float]:
        return OwnTimes(rank, step, 1, compute, 0.001, 0.002, 0.1).to_list()

    for step in range(8):
        timing.heard([own(0, step, 0.05), own(1, step, 0.05), own(2, step, 0.08)])
    slow = timing.slow()
    assert slow is not None and (slow.rank, slow.phase, slow.since) == (2, "its own compute", 0)
    for step in range(8, 8 + LOOKED_AT):
        timing.heard([own(0, step, 0.05), own(1, step, 0.05), own(2, step, 0.05)])
    assert timing.slow() is None


def of_step(mesh: Mesh, step: int) -> list[Event]:
    return Timeline(mesh.recorder.events).of(mesh.recorder.rank, step)


@world(2)
def test_in_training_every_rank_hears_of_every_other_one_step_later(mesh: Mesh, data: Path) -> None:
    training = trained(tiny(data), mesh).training
    heard = [OwnTimes.from_list([*figures]) for figures in training.timing._heard]
    assert [(own.step, own.rank) for own in heard] == [(s, r) for s in range(STEPS - 1) for r in range(2)]
    mine = [own for own in heard if own.rank == mesh.rank]
    for step, own in enumerate(mine):
        found = parts(of_step(mesh, step))
        assert found is not None
        whole = OwnTimes.of(found)  # whose end is read some moments after
        assert (own.compute, own.data, own.micro_batches) == (
            whole.compute,
            whole.data,
            whole.micro_batches,
        )
        assert own.wall <= whole.wall and whole.wall - own.wall == pytest.approx(whole.host - own.host)
        assert own.wall >= own.compute + own.data + own.host > 0
        assert own.micro_batches == training.config.batch.num_micro_batches // 2


@world(2)
def test_what_a_step_says_it_waited_is_what_its_bubbles_are(mesh: Mesh, data: Path) -> None:
    training = trained(tiny(data), mesh).training
    training.timing.end()
    made = training.last
    assert made is not None
    found = bubbles(of_step(mesh, STEPS - 1))
    told = sum(bubble.duration_s for bubble in found) * 1e3
    assert made.exposed_ms + made.waiting_ms == pytest.approx(told, rel=1e-6)
    assert {bubble.cause for bubble in found} <= {GRADIENT_SYNC, GLOBAL_LOSS}
    assert training.timing.breakdown().steps == STEPS


@world(2)
def test_a_run_that_takes_no_step_has_a_breakdown_that_can_be_told(mesh: Mesh, data: Path) -> None:
    training = trained(tiny(data), mesh, steps=0).training
    training.timing.end()
    assert training.timing.breakdown().steps == 0


@world(2, by="process")
def test_every_rank_hears_of_all_and_the_host_is_more_than_one_and_less_than_all(mesh):
    found = peak_memory(mesh.world.group, torch.device("cpu"))
    assert [(row["rank"], row["gpu_peak"]) for row in found["ranks"]] == [(0, None), (1, None)]
    (host,) = found["hosts"]
    peaks = [row["resident_peak"] for row in found["ranks"]]
    if None not in peaks:
        assert max(peaks) < host["resident_peak"] < sum(peaks)  # both have torch loaded, once


def found(*peaks: int | None, hosts: tuple[int | None, ...], gpu: int | None = None) -> dict[str, Any]:
    rows = [{"resident_peak": peak, "gpu_peak": gpu} for peak in peaks]
    return {"ranks": rows, "hosts": [{"resident_peak": each} for each in hosts]}


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        (found(3.1e8, 3e8, hosts=(5.12e8,)), "at most 310 MB per rank, 512 MB for all ranks of the host"),
        (found(3.1e8, 3e8, hosts=(5e8, 6e8)), "at most 310 MB per rank, 600 MB for all ranks of a host"),
        (found(3.1e8, hosts=(3.1e8,)), "at most 310 MB per rank"),
        (found(3e8, hosts=(3e8,), gpu=2.15e9), "at most 2,150 MB of GPU memory per rank, 300 MB per rank"),
        (found(None, None, hosts=(None,)), "not known"),
    ],
)  # fmt: skip
def test_the_line_tells_of_the_rank_and_the_host_that_took_most(memory: dict[str, Any], line: str) -> None:
    assert words(memory) == line


def digests(leaf: int) -> dict[str, str]:
    return {"w": f"{leaf:016x}", "a": "b"}


@world(3)
def test_the_micro_batches_of_all_ranks_are_gathered_in_order_and_the_sum(mesh: Mesh) -> None:
    mine = {0: [4, 5], 1: [0], 2: [1, 2, 3]}[mesh.rank]
    seen = GradientHashes({leaf: digests(leaf) for leaf in mine}, {"w": str(mesh.rank)})
    found = gather_leaves(mesh.world.group, seen)
    ranks = [1, 2, 2, 2, 0, 0]
    leaves = [{"leaf": i, "rank": rank, "parameters": digests(i)} for i, rank in enumerate(ranks)]
    assert found == {"leaves": leaves, "reduced": {"w": "0"}}
    assert list(found["leaves"][0]["parameters"]) == ["w", "a"]  # registration order
