"""Predictions: the recursion, the fit, packing into buckets, what hiding costs, equal buckets, and links."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.cost import AlphaBeta, fit
from instep.timeline.bucket_times import BucketRow
from instep.timeline.predict import (
    CAPS_MB,
    MEBIBYTE,
    ExchangeModel,
    ExchangeTimes,
    HidingCost,
    LinkModel,
    best_bucket,
    busy_share,
    comm_bound_s,
    compute_bound_s,
    copying_s,
    exposed_s,
    fit_buckets,
    over_shared_memory,
    pack,
    pause_s,
    saved_s,
    uniform_exposed_s,
)


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
    cost = fit_buckets([row(0, 1_000_000, 10, 13.0, agree_ms=1.0), row(1, 1_000_000, 20, 13.0, agree_ms=1.0)])
    assert cost.latency_s == pytest.approx(0.003)  # headers, slices there, slices back
    assert cost.s_per_byte == pytest.approx(10e-9)


def test_a_latency_is_no_less_than_what_the_headers_take() -> None:
    # Through the origin by their flights alone.
    cost = fit_buckets([row(0, 1_000_000, 10, 10.0, agree_ms=1.0), row(1, 9_000_000, 20, 90.0, agree_ms=1.0)])
    assert cost.latency_s == pytest.approx(0.001)
    assert cost.s_per_byte == pytest.approx((0.100 - 0.002) / 10e6)


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


def test_the_best_size_is_near_the_square_root_rule() -> None:
    cost, backward_s = AlphaBeta(0.0024, 9.2e-9), 0.5  # 64 MB take longer than backward
    exchange = one_bucket(64, cost, backward_s * 1e3)
    best = min(CAPS_MB, key=lambda cap: exchange.with_buckets(exchange.buckets_of(cap)).exposed_s)
    rule = 64 * math.sqrt(cost.latency_s / backward_s)  # 4.4 MB
    assert best == min(CAPS_MB, key=lambda cap: abs(math.log(cap / rule)))


def test_one_bucket_hides_nothing() -> None:
    now = one_bucket(32, AlphaBeta(0.003, 1e-9), 80.0).now()
    assert now.exposed_s == pytest.approx(0.003 + 32e-9 * MEBIBYTE)
    assert now.hidden_s == pytest.approx(0)


def test_gradients_become_ready_as_the_run_has_shown() -> None:
    #   ready:  0 MB at 20 (backward begins), 8 MB at 60, 16 MB at 100
    half = 8 * MEBIBYTE
    rows = [row(0, half, 60, 30.0), row(1, half, 100, 30.0)]
    exchange = ExchangeModel(rows, strategy="bucketed", cap_mb=8, backward_s=0.08)
    assert exchange.ready_s(4 * MEBIBYTE) == pytest.approx(0.040)
    assert exchange.ready_s(half) == pytest.approx(0.060)
    assert exchange.ready_s(12 * MEBIBYTE) == pytest.approx(0.080)
    assert exchange.now().exposed_s == pytest.approx(0.030)  # 60 to 90, 100 to 130
    assert exchange.buckets_of(16) == [2 * half]
    assert exchange.buckets_of(4) == [half // 2] * 4


def test_parameters_are_kept_whole() -> None:
    sizes = [3 * MEBIBYTE, 1 * MEBIBYTE, 6 * MEBIBYTE]
    rows = [row(k, size, 80 + 10 * k, 5.0 + k) for k, size in enumerate(sizes)]
    exchange = ExchangeModel(rows, strategy="naive", cap_mb=25, backward_s=0.05)
    assert exchange.buckets_of(4) == [4 * MEBIBYTE, 6 * MEBIBYTE]
    assert exchange.now().exposed_s == pytest.approx(0.005 + 0.006 + 0.007)  # one after the other


def test_what_hiding_costs_is_taken_off() -> None:
    now, then = ExchangeTimes(total_s=10, exposed_s=10), ExchangeTimes(total_s=12, exposed_s=3)
    assert saved_s(now, then, HidingCost(busy=0.0)) == 7
    assert saved_s(now, then, HidingCost(busy=0.5)) == 7 - 9 / 2  # 9 are hidden
    assert saved_s(now, then, HidingCost()) == 10 - 12  # no core is idle: only the number of messages changes
    assert saved_s(now, then, HidingCost(measured=0.5)) == 7 - 9 / 2


def test_what_is_no_longer_hidden_no_longer_costs() -> None:
    now, then = ExchangeTimes(total_s=10, exposed_s=4), ExchangeTimes(total_s=2, exposed_s=1)
    assert saved_s(now, then, HidingCost(measured=0.5)) == 3 + 5 / 2  # 6 were hidden, 1 is


def test_a_hidden_exchange_costs_what_is_processor_time_of_it() -> None:
    # 1 for the bytes and 0.5 for each of 4 buckets, of 12 in all; three quarters of which are hidden.
    work = HidingCost(busy=1.0, bytes_s=1.0, bucket_s=0.5)
    outcome = ExchangeTimes(total_s=12, exposed_s=3, num_buckets=4)
    assert work.cost_s(outcome) == pytest.approx(3 * 3 / 4)
    assert HidingCost(0.5, 1.0, 0.5).cost_s(outcome) == pytest.approx(3 * 3 / 8)
    assert work.cost_s(ExchangeTimes(total_s=2, exposed_s=0, num_buckets=4)) == 2  # no more than it takes


def test_pauses_are_what_a_step_waits_beyond_the_flights() -> None:
    flown = [row(0, 1000, 50, 10.0), row(1, 1000, 60, 10.0), row(2, 1000, 70, 10.0)]
    assert pause_s(flown, sync_s=0.036) == pytest.approx(0.002)  # all three are exposed
    hidden = [replace(flown[0], exposed_ms=0.0), replace(flown[1], exposed_ms=5.0), flown[2]]
    assert pause_s(hidden, sync_s=0.018) == pytest.approx(0.002)  # 3 ms for one and a half
    assert pause_s(flown, sync_s=0.020) == 0
    exchange = ExchangeModel(flown, strategy="naive", cap_mb=25, backward_s=0.05, pause_s=0.002)
    assert exchange.now().exposed_s == pytest.approx(0.036)
    assert exchange.cost.latency_s - fit_buckets(flown).latency_s == pytest.approx(0.002)


def test_shared_memory_moves_two_bytes_and_a_third_of_the_latency() -> None:
    cost = over_shared_memory(AlphaBeta(0.003, 9e-9), memory_bytes_per_s=4e9)
    assert (cost.latency_s, cost.s_per_byte) == (pytest.approx(0.001), 0.5e-9)
    assert over_shared_memory(AlphaBeta(0.0, 9e-9), 4e9).latency_s == 1e-4


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


MB = 10**6


def played(num_buckets, total, backward_s, link):
    """Exposed communication of a step with ``num_buckets`` equal buckets, one event after the other."""
    bucket = total / num_buckets
    free_at = 0.0
    for number in range(1, num_buckets + 1):
        full_at = backward_s * number / num_buckets
        free_at = max(free_at, full_at) + link.time_s(bucket)
    return free_at - backward_s


def test_the_best_size_of_an_example():
    # 200 ms for 100 MB, and backward takes 100 ms: comm-bound
    link = AlphaBeta(latency_s=0.2e-3, s_per_byte=2e-9)
    best = best_bucket(100 * MB, 0.1, link)
    assert best / MB == pytest.approx(4.5, abs=0.05)
    assert 100 * MB / best == pytest.approx(22, abs=0.5)
    # exposed: b S - T_b + 2 sqrt(a T_b)
    assert uniform_exposed_s(best, 100 * MB, 0.1, link) == pytest.approx(
        0.2 - 0.1 + 2 * (0.2e-3 * 0.1) ** 0.5
    )


def test_compute_bound_buckets_are_the_smallest_with_which_the_network_keeps_up():
    link = AlphaBeta(latency_s=1e-3, s_per_byte=0.5e-9)  # 50 ms for 100 MB under 100 ms of backward
    best = best_bucket(100 * MB, 0.1, link)
    assert best == pytest.approx(1e-3 * 100 * MB / (0.1 - 0.05))
    assert link.time_s(best) == pytest.approx(
        0.1 * best / (100 * MB)
    )  # travels as fast as the next one fills
    assert uniform_exposed_s(best, 100 * MB, 0.1, link) == pytest.approx(1e-3 * 0.1 / (0.1 - 0.05))


@given(
    num_buckets=st.integers(1, 200),
    latency_s=st.floats(1e-6, 1e-2),
    wire_s=st.floats(1e-3, 1.0),
    backward_s=st.floats(1e-3, 1.0),
)
def test_the_formula_is_the_step_played_through(num_buckets, latency_s, wire_s, backward_s):
    total = 100 * MB
    link = AlphaBeta(latency_s, wire_s / total)
    expected = played(num_buckets, total, backward_s, link)
    assert uniform_exposed_s(total / num_buckets, total, backward_s, link) == pytest.approx(
        expected, abs=1e-9
    )


@given(latency_s=st.floats(1e-6, 1e-2), wire_s=st.floats(1e-3, 1.0), backward_s=st.floats(1e-3, 1.0))
def test_no_other_size_is_better(latency_s, wire_s, backward_s):
    total = 100 * MB
    link = AlphaBeta(latency_s, wire_s / total)
    best = best_bucket(total, backward_s, link)
    assert 0 < best <= total
    least = uniform_exposed_s(best, total, backward_s, link)
    for share in range(1, 400):
        assert least <= uniform_exposed_s(total * share / 400, total, backward_s, link) + 1e-9


def test_each_regime_has_the_larger_of_the_two_forms():
    total, backward_s = 100 * MB, 0.1
    slow, fast = AlphaBeta(1e-4, 5e-9), AlphaBeta(1e-4, 1e-10)
    for bucket in (2 * MB, 20 * MB):
        assert uniform_exposed_s(bucket, total, backward_s, slow) == comm_bound_s(
            bucket, total, backward_s, slow
        )
        assert uniform_exposed_s(bucket, total, backward_s, fast) == compute_bound_s(bucket, fast)


def test_a_bucket_larger_than_everything_is_everything():
    link = AlphaBeta(1e-4, 1e-9)
    assert uniform_exposed_s(1e12, 100 * MB, 0.1, link) == uniform_exposed_s(100 * MB, 100 * MB, 0.1, link)
    assert uniform_exposed_s(1e12, 100 * MB, 0.1, link) == pytest.approx(link.time_s(100 * MB))
    assert best_bucket(100 * MB, 1e-9, link) == 100 * MB


def test_the_largest_message_does_not_drown_the_latency():
    link = AlphaBeta(3e-4, 0.7e-9)
    sizes = [4e3, 64e3, 1e6, 32e6]
    times = [link.time_s(size) for size in sizes]
    times[-1] *= 1.1
    assert fit(sizes, times).latency_s == pytest.approx(link.latency_s, rel=0.05)


PAIR = LinkModel(compute_s=1.0, wire_s=0.8, latency_s=0.01, bytes_per_s=100 * MB, num_ranks=2)


def test_what_does_not_overlap_adds_up():
    assert PAIR.predict("flat", [80 * MB]) == pytest.approx(1.0 + 0.8 + 0.03)
    assert PAIR.predict("naive", [40 * MB, 40 * MB]) == pytest.approx(1.0 + 0.8 + 2 * 0.03)


def test_what_overlaps_takes_the_longer_one_and_the_last_message():
    assert PAIR.predict("bucketed", [60 * MB, 20 * MB]) == pytest.approx(1.0 + 0.2)
    slow = LinkModel(compute_s=0.5, wire_s=0.8, latency_s=0.0, bytes_per_s=100 * MB, num_ranks=2)
    assert slow.predict("overlap", [70 * MB, 10 * MB]) == pytest.approx(0.8 + 0.1)


@pytest.mark.parametrize(("num_ranks", "times"), [(2, 1), (3, 4 / 3), (4, 1.5), (1000, 2)])
def test_an_all_reduce_never_moves_its_bytes_more_than_twice_over_a_link(num_ranks, times):
    link = LinkModel(1.0, 1.0, 0.0, 100 * MB, num_ranks)
    assert link.around_s(100 * MB) == pytest.approx(times, rel=2e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_servers_link_carries_every_workers_gradients_and_weights(num_ranks):
    link = LinkModel(1.0, 1.0, 0.0, 100 * MB, num_ranks)
    assert link.predict("server", [100 * MB]) == pytest.approx(1.0 + 2 * (num_ranks - 1))


def test_a_strategy_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="strategy 'ring': expected naive"):
        PAIR.predict("ring", [1])
