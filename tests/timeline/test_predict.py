"""Predicting an exchange: the recursion, the fit, cutting into buckets, and what hiding costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.timeline.buckets import BucketRow
from instep.timeline.predict import (
    CAPS_MB,
    MEBIBYTE,
    Cost,
    Exchange,
    Hiding,
    Outcome,
    busy_share,
    copying_s,
    cost_of,
    cut,
    exposed_s,
    fit,
    over_shared_memory,
    pause_s,
    saved_s,
)


def row(bucket: int, num_bytes: int, ready_ms: float, flight_ms: float, agree_ms: float = 0.0) -> BucketRow:
    ready = {0: ready_ms - 1, 1: ready_ms}  # rank 1 is the later
    exchange_ms = flight_ms - agree_ms
    return BucketRow(
        bucket, num_bytes, ready, 1.0, 1, 0.0, flight_ms, agree_ms, exchange_ms, flight_ms, 0.0, 9
    )


def one_bucket(num_mb: int, cost: Cost, backward_ms: float) -> Exchange:
    """A run whose gradients left in one bucket at 100 ms, when backward was over."""
    num_bytes = num_mb * MEBIBYTE
    flown = row(0, num_bytes, 100.0, cost.time_s(num_bytes) * 1e3, agree_ms=cost.latency_s * 1e3 / 3)
    return Exchange([flown], strategy="flat", cap_mb=25, backward_s=backward_ms / 1e3)


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


def test_a_fit_finds_latency_and_bandwidth() -> None:
    sizes = [1e3, 1e5, 1e6, 3e7]
    fitted = fit(sizes, [0.002 + 9e-9 * size for size in sizes])
    assert fitted.latency_s == pytest.approx(0.002)
    assert fitted.s_per_byte == pytest.approx(9e-9)


def test_a_fit_is_never_negative() -> None:
    assert fit([1e6, 2e6], [0.001, 0.003]).latency_s == 0
    assert fit([1e6, 2e6], [0.003, 0.002]).s_per_byte == 0


def test_one_size_does_not_tell_latency_from_bandwidth() -> None:
    with pytest.raises(ValueError, match="two sizes or more, got 1 sizes"):
        fit([4.0, 4.0], [1.0, 2.0])


def test_of_buckets_of_one_size_the_headers_tell_the_latency() -> None:
    cost = cost_of([row(0, 1_000_000, 10, 13.0, agree_ms=1.0), row(1, 1_000_000, 20, 13.0, agree_ms=1.0)])
    assert cost.latency_s == pytest.approx(0.003)  # headers, slices there, slices back
    assert cost.s_per_byte == pytest.approx(10e-9)


def test_a_latency_is_no_less_than_what_the_headers_take() -> None:
    # Through the origin by their flights alone.
    cost = cost_of([row(0, 1_000_000, 10, 10.0, agree_ms=1.0), row(1, 9_000_000, 20, 90.0, agree_ms=1.0)])
    assert cost.latency_s == pytest.approx(0.001)
    assert cost.s_per_byte == pytest.approx((0.100 - 0.002) / 10e6)


def test_a_bucket_closes_once_it_has_reached_its_cap() -> None:
    assert cut([3, 3, 3, 3], cap=6) == [6, 6]
    assert cut([5, 5, 5], cap=6) == [10, 5]
    assert cut([9, 1, 1], cap=6) == [9, 2]
    assert cut([], cap=6) == []


@pytest.mark.parametrize("backward_ms", [20.0, 80.0])
@pytest.mark.parametrize("cap_mb", [1, 2, 4, 8])
def test_equal_buckets_agree_with_the_closed_form(cap_mb: int, backward_ms: float) -> None:
    """MG-WFBP, uniform case: max(s/r + (S/s) a + b S - T_b, a + b s)."""
    cost, num = Cost(0.003, 2e-9), 32 // cap_mb
    exchange = one_bucket(32, cost, backward_ms)
    bytes_s, backward_s = cost.s_per_byte * 32 * MEBIBYTE, backward_ms / 1e3
    busy = backward_s / num + num * cost.latency_s + bytes_s - backward_s
    idle = cost.latency_s + bytes_s / num
    then = exchange.with_buckets(exchange.buckets_of(cap_mb))
    assert then.exposed_s == pytest.approx(max(busy, idle))
    assert then.total_s == pytest.approx(num * cost.latency_s + bytes_s)


def test_the_best_size_is_near_the_square_root_rule() -> None:
    cost, backward_s = Cost(0.0024, 9.2e-9), 0.5  # 64 MB take longer than backward
    exchange = one_bucket(64, cost, backward_s * 1e3)
    best = min(CAPS_MB, key=lambda cap: exchange.with_buckets(exchange.buckets_of(cap)).exposed_s)
    rule = 64 * math.sqrt(cost.latency_s / backward_s)  # 4.4 MB
    assert best == min(CAPS_MB, key=lambda cap: abs(math.log(cap / rule)))


def test_one_bucket_hides_nothing() -> None:
    now = one_bucket(32, Cost(0.003, 1e-9), 80.0).now()
    assert now.exposed_s == pytest.approx(0.003 + 32e-9 * MEBIBYTE)
    assert now.hidden_s == pytest.approx(0)


def test_gradients_become_ready_as_the_run_has_shown() -> None:
    #   ready:  0 MB at 20 (backward begins), 8 MB at 60, 16 MB at 100
    half = 8 * MEBIBYTE
    rows = [row(0, half, 60, 30.0), row(1, half, 100, 30.0)]
    exchange = Exchange(rows, strategy="bucketed", cap_mb=8, backward_s=0.08)
    assert exchange.ready_s(4 * MEBIBYTE) == pytest.approx(0.040)
    assert exchange.ready_s(half) == pytest.approx(0.060)
    assert exchange.ready_s(12 * MEBIBYTE) == pytest.approx(0.080)
    assert exchange.now().exposed_s == pytest.approx(0.030)  # 60 to 90, 100 to 130
    assert exchange.buckets_of(16) == [2 * half]
    assert exchange.buckets_of(4) == [half // 2] * 4


def test_parameters_are_kept_whole() -> None:
    sizes = [3 * MEBIBYTE, 1 * MEBIBYTE, 6 * MEBIBYTE]
    rows = [row(k, size, 80 + 10 * k, 5.0 + k) for k, size in enumerate(sizes)]
    exchange = Exchange(rows, strategy="naive", cap_mb=25, backward_s=0.05)
    assert exchange.buckets_of(4) == [4 * MEBIBYTE, 6 * MEBIBYTE]
    assert exchange.now().exposed_s == pytest.approx(0.005 + 0.006 + 0.007)  # one after the other


def test_what_hiding_costs_is_taken_off() -> None:
    now, then = Outcome(total_s=10, exposed_s=10), Outcome(total_s=12, exposed_s=3)
    assert saved_s(now, then, Hiding(busy=0.0)) == 7
    assert saved_s(now, then, Hiding(busy=0.5)) == 7 - 9 / 2  # 9 are hidden
    assert saved_s(now, then, Hiding()) == 10 - 12  # no core is idle: only the number of messages changes
    assert saved_s(now, then, Hiding(measured=0.5)) == 7 - 9 / 2


def test_what_is_no_longer_hidden_no_longer_costs() -> None:
    now, then = Outcome(total_s=10, exposed_s=4), Outcome(total_s=2, exposed_s=1)
    assert saved_s(now, then, Hiding(measured=0.5)) == 3 + 5 / 2  # 6 were hidden, 1 is


def test_a_hidden_exchange_costs_what_is_processor_time_of_it() -> None:
    # 1 for the bytes and 0.5 for each of 4 buckets, of 12 in all; three quarters of which are hidden.
    work = Hiding(busy=1.0, bytes_s=1.0, bucket_s=0.5)
    outcome = Outcome(total_s=12, exposed_s=3, num_buckets=4)
    assert work.cost_s(outcome) == pytest.approx(3 * 3 / 4)
    assert Hiding(0.5, 1.0, 0.5).cost_s(outcome) == pytest.approx(3 * 3 / 8)
    assert work.cost_s(Outcome(total_s=2, exposed_s=0, num_buckets=4)) == 2  # no more than it takes


def test_pauses_are_what_a_step_waits_beyond_the_flights() -> None:
    flown = [row(0, 1000, 50, 10.0), row(1, 1000, 60, 10.0), row(2, 1000, 70, 10.0)]
    assert pause_s(flown, sync_s=0.036) == pytest.approx(0.002)  # all three are exposed
    hidden = [replace(flown[0], exposed_ms=0.0), replace(flown[1], exposed_ms=5.0), flown[2]]
    assert pause_s(hidden, sync_s=0.018) == pytest.approx(0.002)  # 3 ms for one and a half
    assert pause_s(flown, sync_s=0.020) == 0
    exchange = Exchange(flown, strategy="naive", cap_mb=25, backward_s=0.05, pause_s=0.002)
    assert exchange.now().exposed_s == pytest.approx(0.036)
    assert exchange.cost.latency_s == pytest.approx(0.002)  # besides what the flights tell


def test_shared_memory_moves_two_bytes_and_a_third_of_the_latency() -> None:
    cost = over_shared_memory(Cost(0.003, 9e-9), memory_bytes_per_s=4e9)
    assert (cost.latency_s, cost.s_per_byte) == (pytest.approx(0.001), 0.5e-9)
    assert over_shared_memory(Cost(0.0, 9e-9), 4e9).latency_s == 1e-4


def test_sockets_copy_every_byte_again_and_again() -> None:
    assert copying_s(1_000_000, num_ranks=2, memory_bytes_per_s=5.5e9) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "busy"),
    [(2, 1, 2, 1), (2, 1, 3, 0.5), (2, 1, 4, 0), (1, 1, 8, 0), (4, 4, 8, 1)],
)
def test_an_exchange_needs_a_core_that_does_not_compute(
    ranks: int, threads: int, cores: int, busy: float
) -> None:
    assert busy_share(ranks, threads, cores) == busy
