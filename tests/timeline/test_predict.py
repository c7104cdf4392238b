"""Predictions by arithmetic, and the slow rank, which is named; nobody is on a healthy run, however noisy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.comm.cost import AlphaBeta, busy_share
from instep.timeline.breakdown import parts
from instep.timeline.bucket_times import BucketRow
from instep.timeline.predict import (
    MEBIBYTE,
    ExchangeModel,
    ExchangeTimes,
    HidingCost,
    even_backward,
    exposed_s,
    pack,
    saved_s,
)
from instep.timeline.straggler import COMPUTE, DATA, HOST, OwnTimes, SlowRank, find_slow_rank
from tests.timeline.drawings import draw


def row(bucket: int, num_bytes: int, ready_ms: float, flight_ms: float, agree_ms: float = 0.0) -> BucketRow:
    ready = {0: ready_ms - 1, 1: ready_ms}  # rank 1 is the later
    exchange_ms = flight_ms - agree_ms
    return BucketRow(
        bucket, num_bytes, ready, 1.0, 1, 0.0, flight_ms, agree_ms, exchange_ms, flight_ms, 0.0, 9
    )


def one_bucket(num_mb: int, cost: AlphaBeta, backward_ms: float) -> ExchangeModel:
    """A run whose gradients left in one bucket at 100 ms, when backward was over."""
    num_bytes = num_mb * MEBIBYTE
    flown = row(0, num_bytes, 100.0, cost.time_s(num_bytes) * 1e3, agree_ms=cost.latency_s * 1e3 / 3)
    return ExchangeModel([flown], strategy="flat", cap_mb=25, backward_s=backward_ms / 1e3)


def test_a_bucket_starts_when_it_is_ready_and_the_one_before_has_been_exchanged() -> None:
    #   backward  ------|        ends at 6
    #   b0          ===          ready 2
    #   b1             ===       ready 4, waits for b0
    #   b2                ===    ready 6, waits for b1: 5 after the end
    assert exposed_s([2, 4, 6], [3, 3, 3], end_s=6) == 5
    assert exposed_s([2, 4, 6], [1, 1, 1], end_s=6) == 1  # only the last
    assert exposed_s([2, 4], [1, 1], end_s=6) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=8))
def test_the_recursion_ends_where_the_longest_chain_does(buckets: list[tuple[int, int]]) -> None:
    ready, costs = zip(*buckets, strict=True)
    # Some bucket starts at once, and all after it follow without a pause.
    last = max(ready[k] + sum(costs[k:]) for k in range(len(ready)))
    assert exposed_s(ready, costs, end_s=50) == max(last - 50, 0)


def test_a_bucket_closes_once_it_has_reached_its_cap() -> None:
    assert pack([3, 3, 3, 3], cap=6) == [6, 6]
    assert pack([5, 5, 5], cap=6) == [10, 5]
    assert pack([9, 1, 1], cap=6) == [9, 2]
    assert pack([], cap=6) == []


@pytest.mark.parametrize("backward_ms", [20.0, 80.0])
@pytest.mark.parametrize("cap_mb", [1, 2, 4, 8])
def test_equal_buckets_agree_with_the_closed_form(cap_mb: int, backward_ms: float) -> None:
    """MG-WFBP, uniform case: max(s/r + (S/s) a + b S - T_b, a + b s)."""
    cost, num = AlphaBeta(0.003, 2e-9), 32 // cap_mb
    exchange = one_bucket(32, cost, backward_ms)
    bytes_s, backward_s = cost.s_per_byte * 32 * MEBIBYTE, backward_ms / 1e3
    busy = backward_s / num + num * cost.latency_s + bytes_s - backward_s
    idle = cost.latency_s + bytes_s / num
    then = exchange.with_buckets(exchange.buckets_of(cap_mb))
    assert then.exposed_s == pytest.approx(max(busy, idle))
    assert then.total_s == pytest.approx(num * cost.latency_s + bytes_s)


def test_what_hiding_costs_is_taken_off() -> None:
    now, then = ExchangeTimes(total_s=10, exposed_s=10), ExchangeTimes(total_s=12, exposed_s=3)
    assert saved_s(now, then, HidingCost(busy=0.0)) == 7
    assert saved_s(now, then, HidingCost(busy=0.5)) == 7 - 9 / 2  # 9 are hidden
    assert saved_s(now, then, HidingCost()) == 10 - 12  # no core is idle: only the number of messages changes
    assert saved_s(now, then, HidingCost(measured=0.5)) == 7 - 9 / 2


def test_a_hidden_exchange_costs_what_is_processor_time_of_it() -> None:
    # 1 for the bytes and 0.5 for each of 4 buckets, of 12 in all; three quarters of which are hidden.
    work = HidingCost(busy=1.0, bytes_s=1.0, bucket_s=0.5)
    outcome = ExchangeTimes(total_s=12, exposed_s=3, num_buckets=4)
    assert work.cost_s(outcome) == pytest.approx(3 * 3 / 4)
    assert HidingCost(0.5, 1.0, 0.5).cost_s(outcome) == pytest.approx(3 * 3 / 8)
    assert work.cost_s(ExchangeTimes(total_s=2, exposed_s=0, num_buckets=4)) == 2  # no more than it takes


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "busy"),
    [(2, 1, 2, 1), (2, 1, 3, 0.5), (2, 1, 4, 0), (1, 1, 8, 0), (4, 4, 8, 1)],
)
def test_an_exchange_needs_a_core_that_does_not_compute(
    ranks: int, threads: int, cores: int, busy: float
) -> None:
    assert busy_share(ranks, threads, cores) == busy


MB = 10**6


def exposed_of(num_buckets: float, total: int, backward_s: float, link: AlphaBeta) -> float:
    """By the two closed forms, for any number of equal buckets, a fraction of one too."""
    wire_s = num_buckets * link.latency_s + link.s_per_byte * total
    return max(backward_s / num_buckets + wire_s - backward_s, link.time_s(total / num_buckets))


@given(
    num_buckets=st.integers(1, 200),
    latency_s=st.floats(1e-6, 1e-2),
    wire_s=st.floats(1e-3, 1.0),
    backward_s=st.floats(1e-3, 1.0),
)
def test_equal_buckets_of_an_even_backward_agree_with_the_closed_form(
    num_buckets: int, latency_s: float, wire_s: float, backward_s: float
) -> None:
    total = 100 * MB
    link = AlphaBeta(latency_s, wire_s / total)
    sizes = [total // num_buckets] * num_buckets
    outcome = even_backward(sizes, backward_s, link, overlaps=True)
    expected = exposed_of(num_buckets, sum(sizes), backward_s, link)
    assert outcome.exposed_s == pytest.approx(expected, abs=1e-9)


def test_buckets_of_different_sizes_leave_in_their_order() -> None:
    #   backward  --------|        ends at 8: 1 per byte
    #   b0           ===           3 bytes: ready at 3, takes 1 + 2
    #   b1              =====      4 bytes: ready at 7
    #   b2                   ==    1 byte: ready at 8, waits for b1 until 12
    cost = AlphaBeta(latency_s=1.0, s_per_byte=1.0)
    assert even_backward([3, 4, 1], 8.0, cost, overlaps=True) == ExchangeTimes(11.0, 6.0, 3)
    assert even_backward([3, 4, 1], 8.0, cost, overlaps=False) == ExchangeTimes(11.0, 11.0, 3)


COMPUTE_S, DATA_S, HOST_S = 0.035, 0.005, 0.020  # per micro-batch, per micro-batch, per step


def run(
    ranks: int,
    steps: int,
    seed: int,
    plant: Callable[[OwnTimes], OwnTimes] = lambda own: own,
    *,
    micro_batches: Sequence[int] = (),
    noise: float = 0.08,
) -> list[OwnTimes]:
    """Steps of 100 ms: +-8 % noise on all, one figure in fifty takes three times as long."""
    chance = random.Random(seed)

    def noisy(seconds: float) -> float:
        return seconds * chance.uniform(1 - noise, 1 + noise) * (3 if chance.random() < 0.02 else 1)

    rows = []
    for step in range(steps):
        for rank in range(ranks):
            n = micro_batches[rank] if micro_batches else 2
            own = OwnTimes(rank, step, n, noisy(COMPUTE_S * n), noisy(DATA_S * n), noisy(HOST_S), 0.1)
            rows.append(plant(own))
    return rows


def slow_by(rank: int, phase: str, seconds: float, since: int = 0) -> Callable[[OwnTimes], OwnTimes]:
    field = {COMPUTE: "compute", DATA: "data", HOST: "host"}[phase]

    def plant(own: OwnTimes) -> OwnTimes:
        late = own.rank == rank and own.step >= since
        return replace(own, **{field: getattr(own, field) + seconds}) if late else own

    return plant


@given(st.integers(2, 9), st.integers(5, 120), st.integers(0, 10**9), st.sampled_from([(), (3, 3, 2)]))
def test_a_healthy_run_names_nobody(
    ranks: int, steps: int, seed: int, micro_batches: tuple[int, ...]
) -> None:
    assert find_slow_rank(run(len(micro_batches) or ranks, steps, seed, micro_batches=micro_batches)) is None


@given(st.integers(2, 9), st.integers(30, 120), st.integers(0, 10**9), st.sampled_from([COMPUTE, DATA, HOST]))
def test_a_rank_that_is_slow_by_30_percent_is_named(ranks: int, steps: int, seed: int, phase: str) -> None:
    slow = find_slow_rank(run(ranks, steps, seed, slow_by(ranks - 1, phase, 0.030)))
    assert slow is not None
    assert (slow.rank, slow.phase) == (ranks - 1, phase)
    assert slow.excess_s == pytest.approx(0.030, abs=0.006)
    assert slow.share == pytest.approx(0.30, abs=0.06)
    assert slow.since <= 5


@settings(max_examples=20)
@given(st.integers(0, 10**9), st.sampled_from([COMPUTE, DATA, HOST]))
def test_the_step_is_found_at_which_a_rank_became_slow(seed: int, phase: str) -> None:
    slow = find_slow_rank(run(3, 400, seed, slow_by(1, phase, 0.030, since=250)))
    assert slow is not None
    assert (slow.rank, slow.phase) == (1, phase)
    assert abs(slow.since - 250) <= 8
    assert slow.steps == 400 - slow.since


def exact(
    ranks: int, steps: int, plant: Callable[[OwnTimes], OwnTimes], micro_batches: Sequence[int] = ()
) -> SlowRank | None:
    """Without noise, so that every figure can be told."""
    rows = [
        OwnTimes(r, s, micro_batches[r] if micro_batches else 2, 0.07, 0.01, 0.02, 0.1)
        for s in range(steps)
        for r in range(ranks)
    ]
    return find_slow_rank([plant(row) for row in rows])


def test_without_noise_the_figures_are_exact() -> None:
    slow = exact(4, 30, slow_by(2, DATA, 0.02, since=11))
    assert slow == SlowRank(2, DATA, 11, pytest.approx(0.02), pytest.approx(0.2), 19, pytest.approx(0.02))


def test_who_is_slow_only_now_and_then_is_not_named() -> None:
    def plant(own: OwnTimes) -> OwnTimes:
        return replace(own, host=0.08) if own.rank == 1 and own.step % 3 else own  # 67 % of the steps

    assert exact(2, 60, plant) is None


def test_more_micro_batches_are_no_slowness_and_slow_ones_are() -> None:
    micro_batches = (3, 3, 2)

    def fair(own: OwnTimes) -> OwnTimes:
        return replace(own, compute=0.03 * own.micro_batches, data=0.005 * own.micro_batches)

    assert exact(3, 20, fair, micro_batches) is None
    slow = exact(3, 20, lambda own: slow_by(2, COMPUTE, 0.024)(fair(own)), micro_batches)
    assert slow == SlowRank(
        2, COMPUTE, 0, pytest.approx(0.024), pytest.approx(0.24), 20, pytest.approx(0.024)
    )


def test_own_time_is_all_but_waits_and_the_update_and_travels_as_figures() -> None:
    found = parts(
        draw(
            """
            data            |dd...............|
            compute         |..ffbb......uuu..|
            host            |......SSSSSS...l.|
            communication 0 |......111AXX.....|
            """,
            rank=3,
            step=7,
        )
    )
    assert found is not None
    own = OwnTimes.of(found)
    assert own == OwnTimes(3, 7, 1, 0.004, 0.002, pytest.approx(0.001), 0.017)  # without the ledger
    assert OwnTimes.from_list(own.to_list()) == own
    with pytest.raises(ValueError, match="expected 8 figures of a rank's step, got 2"):
        OwnTimes.from_list([1.0, 2.0])
